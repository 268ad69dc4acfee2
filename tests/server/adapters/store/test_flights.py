import threading
from concurrent.futures import ThreadPoolExecutor

from loralane_server.adapters.store.flights import Flights, failed
from loralane_server.errors import AdapterNotFound, SourceUnavailable


def test_who_asks_meanwhile_gets_the_answer_of_the_first() -> None:
    flights: Flights[int] = Flights()
    go = threading.Event()
    calls: list[int] = []

    def call() -> int:
        go.wait()
        calls.append(1)
        return len(calls)

    with ThreadPoolExecutor(4) as executor:
        futures = [flights.join("a", executor, call) for _ in range(8)]
        other = flights.join("b", executor, lambda: 7)
        assert other.result() == 7
        assert not futures[0].cancel()
        go.set()

        assert [future.result() for future in futures] == [1] * 8
        assert flights.join("a", executor, call).result() == 2


def test_an_error_reaches_all_and_is_not_remembered() -> None:
    flights: Flights[int] = Flights()
    go = threading.Event()
    error = AdapterNotFound("no such adapter")

    def call() -> int:
        go.wait()
        raise error

    with ThreadPoolExecutor(1) as executor:
        futures = [flights.join("a", executor, call) for _ in range(3)]
        go.set()

        assert [future.exception() for future in futures] == [error] * 3
        assert flights.join("a", executor, lambda: 1).result() == 1


def test_a_closed_executor_is_an_error_of_the_future() -> None:
    flights: Flights[int] = Flights()
    begun, go = threading.Event(), threading.Event()

    def call() -> int:
        begun.set()
        go.wait()
        return 1

    executor = ThreadPoolExecutor(1)
    began = flights.join("a", executor, call)
    waiting = flights.join("b", executor, lambda: 2)
    begun.wait()
    executor.shutdown(wait=False, cancel_futures=True)
    go.set()

    assert began.result() == 1
    assert isinstance(waiting.exception(), SourceUnavailable)
    assert isinstance(flights.join("c", executor, lambda: 3).exception(), SourceUnavailable)


def test_a_failed_future_has_ended() -> None:
    error = AdapterNotFound("no such adapter")

    assert failed(error).exception() is error
