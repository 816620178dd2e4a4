# An image with this project and everything that it needs; nothing is compiled.
#
#     docker build -t megatron .                                                  # CUDA, from PyPI
#     docker build -t megatron --build-arg TORCH='torch==2.13.0 --index-url URL' .       # CPU
#     docker build -t megatron --build-arg BASE=nvcr.io/nvidia/pytorch:XX.XX-py3 .
#
# docs/how-to/containers.md has more. The base needs Python 3.10 or newer with pip.
ARG BASE=python:3.11-slim
FROM ${BASE}

# Installed where the base has no torch that fits; the words after it are for pip.
ARG TORCH="torch==2.13.0"
# Extras of setup.py, such as fast,s3,wandb.
ARG EXTRAS=""

# Packages go next to those of the base's own Python, so that its torch and torchrun find them.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore \
    DS_BUILD_OPS=0

WORKDIR /workspace/megatron

# The layers that change rarely come first. pip's configuration, if it needs one, is a secret of the
# build (--secret id=pip,src=pip.conf), so that no layer has an address or a password.
#
# As make install does, the versions and hashes of requirements/; but on a base with a torch of its
# own, such as NVIDIA's, the packages that were built with it stay: only what is missing is added, by
# the ranges of setup.py.
COPY setup.py ./
COPY megatron/__init__.py megatron/
COPY requirements requirements
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    lists=$(echo ",${EXTRAS}" | sed 's/,\([^,]\{1,\}\)/ -r requirements\/\1.txt/g; s/,//g'); \
    if python3 -c 'import torch; v = torch.__version__.split(".")[:2]; \
        raise SystemExit(not (2, 11) <= tuple(map(int, v)) < (2, 14))' 2>/dev/null; \
    then python3 -c 'import sys, setuptools, distutils.core as core; \
        project = core.run_setup("setup.py", stop_after="init"); \
        extras = [project.extras_require[name] for name in sys.argv[1].split(",") if name]; \
        needed = sum(extras, project.install_requires); \
        print(*(one for one in needed if not one.startswith("torch")), sep="\n")' "${EXTRAS}" \
        > /tmp/requirements.txt \
    && python3 -m pip install -r /tmp/requirements.txt && rm /tmp/requirements.txt; \
    else install="python3 -m pip install --require-hashes --no-deps --no-build-isolation" \
    && $install -r requirements/build.txt && $install -r requirements/base.txt $lists \
    && python3 -m pip install ${TORCH}; fi

# Editable: a checkout that is mounted at this place is what runs.
COPY . .
RUN python3 -m pip install --no-deps --no-build-isolation --no-index -e . \
    && chmod -R a+rX /workspace && chmod a+rwx,+t /workspace

CMD ["bash"]
