"""Users of the service, for locust, in processes of their own:

    locust -f workloads/serving/locustfile.py --headless -u 32 -t 60s --host http://127.0.0.1:8000

Never import it in a worker: locust patches sockets for gevent, which does not go together with
Ray's gRPC, and a touch of an absent block stops a whole thread, with all greenlets on it.

Nine of ten requests are look-ups, whose rows are compared with what the table must hold; the others
are the control. A try that `client_rules` asks for again is listed by itself, and is no failure.
"""

from __future__ import annotations

import os
import time
from typing import Any, Final

import numpy as np
from locust import FastHttpUser, task

from clamor_ray.workloads.serving import client_rules
from clamor_ray.workloads.serving.bodies import BYTES_TYPE, encode_ids
from clamor_ray.workloads.serving.table import Int64

IDS_PER_REQUEST: Final = int(os.environ.get("SERVING_IDS", "16"))
HEADERS: Final = {"content-type": BYTES_TYPE}


class Reader(FastHttpUser):
    """One after the other, as fast as answers come."""

    network_timeout = connection_timeout = client_rules.TRY_TIMEOUT_S

    def on_start(self) -> None:
        self.rng = np.random.default_rng()
        self.n_rows = int(self.client.get("/about").json()["n_rows"])

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

    @staticmethod
    def _judge(response: Any, ids: Int64, is_checked: bool) -> None:
        try:
            if is_checked:
                client_rules.check(response.content, ids)
        except client_rules.WrongAnswer as error:
            response.failure(f"WRONG ANSWER: {error}")
        else:
            response.success()
