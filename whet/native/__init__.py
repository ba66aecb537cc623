"""C++ for a CPU (kernels/), built by the machine's own compiler: decode steps, attention and layers of training.

`python -m whet.native` builds all kernels and prints which of them run on this machine. The package is frozen: its
three families of kernels are maintained, and no fourth will be added. Other fast code is written in torch.
"""
