"""Attention kernels: they know tensors, never models. One contract, one file each."""
