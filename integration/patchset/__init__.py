"""Read, check, apply, import and export the patches, and build overlays from them."""
