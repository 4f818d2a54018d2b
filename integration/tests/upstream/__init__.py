"""The patch tool, on small fake upstreams and once on the real ones."""
