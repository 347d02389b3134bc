"""One scoring process: reads one JSON request a line, answers one JSON line. Started by `Scorer`, imports no torch.

Its answers leave on a private copy of standard output, so nothing that a library prints can be taken for one. The
kernel ends it when an item has used up its processor time, whether or not the trainer is still there to notice.
"""

import json
import os
import resource
import signal
import sys

ADDRESS_SPACE_BYTES = 2 << 30  # a power tower asks for more memory than there is; it gets MemoryError instead


def main() -> None:
    timeout_s = float(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, in the middle of native code too
    from score_centering.reward.judge import is_gold, judge

    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    _reply(replies, {"ready": True})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, timeout_s)
        try:
            if "answer" in request:
                reply = {"verdict": judge(request["answer"], request["gold"])}
            else:
                reply = {"verdict": is_gold(request["gold"])}
        except Exception as error:  # whatever an answer makes the libraries raise is this item's error alone
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _reply(replies, reply)


def _reply(replies, reply: dict) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
