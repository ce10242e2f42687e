"""Users of the service, for locust, in processes of their own:

    locust -f workloads/serving/locustfile.py --headless -u 32 -t 60s --host http://127.0.0.1:8000

Never import it in a worker: locust patches sockets for gevent, which does not go together with
Ray's gRPC, and a touch of an absent block stops a whole thread, with all greenlets on it.

Nine of ten requests are look-ups, whose rows are compared with what the table must hold; the others
are the control. A try that `client_rules` asks for again is listed by itself, and is no failure.

Who makes updates meanwhile names one of them in SERVING_REACHES: locust's exit status is 1 where no
answer of this process was of that update or a later one.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any, Final

import numpy as np
from locust import FastHttpUser, events, task

from clamor_ray.workloads.serving import client_rules
from clamor_ray.workloads.serving.bodies import BYTES_TYPE, encode_ids
from clamor_ray.workloads.serving.table import Int64

IDS_PER_REQUEST: Final = int(os.environ.get("SERVING_IDS", "16"))
REACHES: Final = int(os.environ.get("SERVING_REACHES", "0"))  # every table has update 0
HEADERS: Final = {"content-type": BYTES_TYPE}


class Reader(FastHttpUser):
    """One after the other, as fast as answers come."""

    network_timeout = connection_timeout = client_rules.TRY_TIMEOUT_S
    largest_update = 0  # that any of them has seen

    def on_start(self) -> None:
        self.rng = np.random.default_rng()
        about = self.client.get("/about").json()
        self.n_rows, self.dim = int(about["n_rows"]), int(about["dim"])

    @task(9)
    def look_up(self) -> None:
        ids = self.rng.integers(0, self.n_rows, IDS_PER_REQUEST)
        self._ask("/lookup", ids, is_checked=True)

    @task(1)
    def control(self) -> None:
        self._ask("/control", np.zeros(IDS_PER_REQUEST, np.int64), is_checked=False)

    def _ask(self, path: str, ids: Int64, *, is_checked: bool) -> None:
        for n_tries in range(1, client_rules.MOST_TRIES + 1):
            body: Any = encode_ids(ids)  # bytes, which its annotation does not name
            post: Any = self.client.post(path, data=body, headers=HEADERS, catch_response=True)
            with post as response:
                if response.status_code == 200:
                    self._judge(response, ids, is_checked)
                    return
                is_retried = response.status_code in (0, *client_rules.RETRIED_STATUSES)
                if not is_retried or n_tries == client_rules.MOST_TRIES:
                    response.failure(f"status {response.status_code}: {response.text}")
                    return
                response.request_meta["name"] = f"{path} (a try that was repeated)"
                response.success()
            time.sleep(client_rules.pause_s(n_tries))  # gevent's: the other users go on

    def _judge(self, response: Any, ids: Int64, is_checked: bool) -> None:
        try:
            if is_checked:
                update = client_rules.check(response.content, ids, self.dim)
                Reader.largest_update = max(Reader.largest_update, update)
        except client_rules.WrongAnswer as error:
            response.failure(f"WRONG ANSWER: {error}")
        else:
            response.success()


@events.quitting.add_listener
def fail_if_behind(environment: Any, **_: Any) -> None:
    """Replicas that do not follow give right answers, of an old update."""
    if Reader.largest_update < REACHES:
        text = "STALE ANSWERS: the last one was of update %d, and update %d was made"
        logging.error(text, Reader.largest_update, REACHES)
        environment.process_exit_code = 1
