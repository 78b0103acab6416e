"""The live page of real learners: on the first leader, under attack, and on the next one after a failure."""

from __future__ import annotations

import http.client
import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.launcher import free_port, run_learners, wait_for

pytestmark = pytest.mark.mpi

PROGRAM = Path(__file__).parent / "programs" / "live_page.py"
TOKEN = "a-token-of-the-test"
OPTIONS = {
    "HVD_ADPSGD_SUPER_LEARNER_SIZE": "1",
    "HVD_ADPSGD_REPORT_S": "0.1",
    "HVD_ADPSGD_DASHBOARD_TOKEN": TOKEN,
}


def page(port: int, path: str = "/events", token: str = TOKEN) -> tuple[int, str]:
    """Status and first line; (0, "") where nothing answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", f"{path}?token={token}")
        answer = connection.getresponse()
        return answer.status, answer.readline().decode()
    except (OSError, http.client.HTTPException):
        return 0, ""
    finally:
        connection.close()


def shows(port: int, *patterns: str) -> bool:
    status, line = page(port)
    if status != 200 or not line.endswith("\n"):  # that leader has just died
        return False
    text = "".join(json.loads(line.removeprefix("data: "))["parts"].values())
    return all(re.search(pattern, text) for pattern in patterns)


def attack(port: int) -> None:
    """200 connections that say nothing, huge headers, and tokens that are wrong."""
    idle = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(200)]
    for connection in idle:
        connection.close()
    wait_for(lambda: page(port, "/")[0] == 200, "the page answers after 200 connections")
    for _ in range(20):
        assert page(port, "/metrics", "wrong")[0] in (0, 403)  # 0: too many per second
        assert page(port, "/" + "x" * (1 << 20))[0] in (0, 400, 414, 431)


def test_the_page_moves_to_the_next_leader_and_training_goes_on(tmp_path: Path) -> None:
    port = free_port()
    env = {**OPTIONS, "HVD_ADPSGD_DASHBOARD": f":{port}"}
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run_learners, 3, PROGRAM, args=[str(tmp_path)], env=env)
        try:
            everyone = [rf"<td>{i}</td><td>[^<]*</td><td>ok</td>" for i in range(3)]
            wait_for(
                lambda: job.done() or shows(port, *everyone, "loss, over steps"), "a page of all"
            )
            attack(port)
            (tmp_path / "kill.0").touch()
            moved = r"failed: super learner 0", r"<td>0</td><td>[^<]*</td><td>FAILED</td>"
            wait_for(lambda: job.done() or shows(port, *moved), "the page of the next leader")
        finally:
            (tmp_path / "stop").touch()
        result = job.result()
    facts = {each["rank"]: each for each in result.said if "step" in each}
    assert set(facts) == {1, 2}, result.report()
    assert all(each["step"] > 100 for each in facts.values()), facts
    assert result.stderr.count("the dashboard of this run is on host") == 2, result.report()
    assert result.stderr.count("no dashboard at") == 0, result.report()


@pytest.mark.extended
def test_a_bad_address_is_an_error_on_all(tmp_path: Path) -> None:
    env = {**OPTIONS, "HVD_ADPSGD_DASHBOARD": "8265"}
    result = run_learners(2, PROGRAM, args=[str(tmp_path)], env=env)
    assert result.returncode != 0
    assert result.stderr.count("ConfigError: ") >= 2, result.report()
    assert "HVD_ADPSGD_DASHBOARD" in result.stderr
