"""Messages beside operations over all learners: topics, and the thread that exchanges their messages."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

_OPEN_S, _IDLE_S = 0.02, 0.2  # between two exchanges while a topic is open, and else


class Topics:
    """The topics of a process, and the thread that exchanges their messages, once there is a need.

    Args:
        serve: exchanges the messages of all topics, see Collectives.serve.

    Attributes:
        by_name: the topics. Each has `talk(living, received)`, which is given the ranks of the learners not
            known to have ended and the (rank, message) of the topic's namesakes there, returns those to send,
            and never waits; `is_open`: whether messages are expected; `fail(error)`: there will be no more.
    """

    def __init__(self, serve: Callable[[], object]) -> None:
        self.by_name: dict[str, Any] = {}
        self._serve = serve
        self._woken, self._starting = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Exchange messages now, and from now on, on the thread."""
        self._woken.set()
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="topics")
                self._thread.start()

    def serve(self) -> None:
        """Exchange messages on the calling thread, until `wake`."""
        if self._thread is None:
            self._serve()

    def remove(self, name: str) -> Any:
        """Exchange the last messages of a topic, and return it, if there is one; the last ends the thread."""
        with contextlib.suppress(Exception):  # nobody may be there any more
            self._serve()
        topic = self.by_name.pop(name, None)
        if self._thread is not None and not self.by_name:
            self._woken.set()
            self._thread.join()
        return topic

    def _run(self) -> None:
        try:
            while topics := list(self.by_name.values()):
                self._woken.wait(_OPEN_S if any(topic.is_open for topic in topics) else _IDLE_S)
                self._woken.clear()
                self._serve()
        except Exception as error:  # raised by the script's next call of the topic
            for topic in list(self.by_name.values()):
                topic.fail(error)
