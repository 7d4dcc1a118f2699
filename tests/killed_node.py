"""`dltta node` in a process that is killed at one step: `python killed_node.py STEP node -m MODEL …`."""

import os
import signal
import sys

from dltta.serving import node, outbox

STEPS = {
    "received": (node.Node, "_predict"),
    "in the outbox": (node, "write_atomically"),
    "sent": (outbox.Web, "send"),
}


def kill_at(step):
    """Before the step is taken; a sending is answered before that."""
    owner, name = STEPS[step]
    function = getattr(owner, name)

    def killed(*args, **kwargs):
        if step == "sent":
            function(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, killed)


if __name__ == "__main__":
    if sys.argv[1] != "never":
        kill_at(sys.argv[1])
    del sys.argv[1]
    from dltta.cli import main

    main()
