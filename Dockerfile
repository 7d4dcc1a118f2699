# docker build -t dltta .                                   CPU
# docker build -t dltta:cuda --build-arg TORCH=cu126 .       CUDA: the name of one of PyTorch's builds
# docker run --rm -v "$PWD:/work" dltta adapt -m models/a -i incoming -o predictions
ARG PYTHON=3.11
FROM python:${PYTHON}-slim AS build
ARG TORCH=cpu
ARG EXTRAS=dicom
WORKDIR /source
COPY constraints.txt pyproject.toml README.md LICENSE THIRD_PARTY.md ./
COPY src ./src
RUN python -m venv /opt/dltta \
 && /opt/dltta/bin/pip install --no-cache-dir -c constraints.txt --extra-index-url "https://download.pytorch.org/whl/${TORCH}" ".[${EXTRAS}]"

FROM python:${PYTHON}-slim
COPY --from=build /opt/dltta /opt/dltta
RUN useradd --create-home dltta
USER dltta
WORKDIR /work
ENV PATH=/opt/dltta/bin:$PATH PYTHONUNBUFFERED=1
ENTRYPOINT ["dltta"]
CMD ["--help"]
