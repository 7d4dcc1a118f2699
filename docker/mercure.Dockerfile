# docker build -f docker/mercure.Dockerfile -t dltta-mercure --build-context models=models .
# A processing module for mercure. Everything is installed at build time: the container needs no network.
FROM python:3.11-slim
WORKDIR /app
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir -c constraints.txt ".[dicom]"
ENV OMP_NUM_THREADS=2
CMD ["python", "-m", "dltta.serving.mercure"]
