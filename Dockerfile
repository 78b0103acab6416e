# Python, Open MPI 5, torch, Horovod and hvd_adpsgd, from the wheel in dist/ (make wheel):
#
#   docker build -t hvd_adpsgd .
#   docker run --rm --shm-size=2g hvd_adpsgd
#   docker run --rm --shm-size=2g -e HVD_ADPSGD_SUPER_LEARNER_SIZE=1 hvd_adpsgd \
#       horovodrun -np 4 python /opt/hvd_adpsgd/quadratic.py
#
# With CUDA and NCCL (untested; the base image must have nvcc and NCCL's headers):
#
#   docker build -t hvd_adpsgd:cuda --build-arg BASE=nvidia/cuda:12.8.1-devel-ubuntu24.04 \
#       --build-arg GPU_OPERATIONS=NCCL .
#   docker run --rm --gpus all --shm-size=16g hvd_adpsgd:cuda
ARG BASE=debian:12
FROM ${BASE}

RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        build-essential ca-certificates openssh-client openssh-server python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH
# Open MPI's launcher refuses to start as root otherwise; in a container there is no other user.
ENV OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
RUN python3 -m venv $VIRTUAL_ENV

# Another build of torch: --build-arg TORCH="torch==2.13.0 --index-url URL"
ARG TORCH=torch==2.13.0
RUN pip install --no-cache-dir ${TORCH}

# The versions that are tested, but for torch.
COPY requirements.txt dist/hvd_adpsgd-*.whl /tmp/dist/
RUN cd /tmp/dist && sed -i '/^torch==/d' requirements.txt \
 && pip install --no-cache-dir -c requirements.txt "$(echo ./*.whl)[all]" && rm -r /tmp/dist

# Horovod is compiled for this torch and this Open MPI: minutes.
ARG GPU_OPERATIONS=
RUN ${GPU_OPERATIONS:+env HOROVOD_GPU_OPERATIONS=${GPU_OPERATIONS}} python -m hvd_adpsgd build-horovod \
 && rm -rf /root/.cache

COPY examples/quadratic.py /opt/hvd_adpsgd/
WORKDIR /work
CMD ["python", "-m", "hvd_adpsgd", "doctor"]
