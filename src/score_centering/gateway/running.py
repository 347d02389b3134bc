"""Servers in a thread of their own, so that the thread that owns the engine stays free for it."""

import asyncio
import os
import resource
import socket
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Self, TypeVar

import uvicorn
from starlette.types import ASGIApp

from score_centering.settings import UserError

BACKLOG = 2048
LOOPBACK = "127.0.0.1"

T = TypeVar("T")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        UserError: the port is in use, or the address is not this machine's.
    """
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0).lower()}") from None


def uvicorn_server(app: ASGIApp) -> uvicorn.Server:
    """A server of `app` on asyncio and h11, quiet but for errors; it lets open requests end for two seconds."""
    allow_many_files()
    return uvicorn.Server(
        uvicorn.Config(
            app,
            loop="asyncio",
            http="h11",
            ws="none",
            log_level="warning",
            access_log=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=2,
        )
    )


def allow_many_files() -> None:
    """Raise the soft limit of open files to the hard one: a connection is a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Background:
    """An event loop in a thread of its own, with the servers that were started on it. Use it as a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="servers", daemon=True)
        self._servers: list[tuple[uvicorn.Server, Future[None]]] = []
        self._clients: set[asyncio.Task[Any]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.submit(_cancel(self._clients)).result()  # first: a server that ends under an open request logs a fault
        for server, served in reversed(self._servers):
            server.should_exit = True
            served.result()
        self.submit(_cancel(None)).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Starts `work` on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def start_client(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """As `submit`, for work that asks the servers of this loop: it is ended before they are."""

        async def remembered() -> T:
            task = asyncio.current_task()
            assert task is not None
            self._clients.add(task)
            try:
                return await work
            finally:
                self._clients.discard(task)

        return self.submit(remembered())

    def serve(self, app: ASGIApp, port: int = 0) -> str:
        """Serves `app` on the loopback address; its URL once it answers."""
        listening = listen(LOOPBACK, port)
        server = uvicorn_server(app)
        served = self.submit(server.serve(sockets=[listening]))
        while not server.started:
            if served.done():
                served.result()
                raise UserError(f"a server on port {port} ended before it started")
            time.sleep(0.005)
        self._servers.append((server, served))
        return f"http://{LOOPBACK}:{listening.getsockname()[1]}"


async def _cancel(tasks: set[asyncio.Task[Any]] | None) -> None:
    """Ends `tasks`; None: whatever else runs on the loop."""
    others = (asyncio.all_tasks() if tasks is None else set(tasks)) - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
