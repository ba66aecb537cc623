"""C++ for a CPU (kernels/), built by the machine's own compiler: decode steps, attention and layers of training.

`python -m whet.native` builds all of it and prints what runs on this machine. The package is frozen: its three families
are kept right and fast, and there will be no fourth. What else must be fast is written in torch.
"""
