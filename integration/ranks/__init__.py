"""What each rank runs: TorchTitan's trainer with our configs, attention and data loader."""
