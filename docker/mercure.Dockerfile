# docker build -t dltta .
# docker build -t dltta-mercure -f docker/mercure.Dockerfile docker
# A processing module for mercure, on top of the image of the main Dockerfile. Everything is installed at build time: the
# container needs no network. mercure runs it as a user of its own that has no home.
FROM dltta
ENV HOME=/tmp OMP_NUM_THREADS=2
ENTRYPOINT ["python", "-m", "dltta.serving.mercure"]
CMD []
