"""Every process of Python that has the GPU computes on it, workers of ranks too."""

import os

if os.environ.get("SOFTWARE_GPU_EXECUTES") == "1":
    from software_gpu.runtime.joined import install

    install()
