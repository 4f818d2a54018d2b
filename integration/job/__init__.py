"""The training job: model configs, CPU override, data, launch. TorchTitan does the training."""
