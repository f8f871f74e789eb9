"""Stands in for a vLLM server where a real one cannot be made to do what a test needs: tie, part, or find its port taken.

    PYTHON -m vllm.entrypoints.openai.api_server --port P ...      as Eyas starts the real one; PYTHON is a script made by `fake_python`

It counts upwards from the prompt's last token; behaviour comes from the JSON file beside the script:

    starts      file to which a line is added for each start, "draft" or "plain"
    parting     {prompt's last token: token} that the server with the draft says second instead
    best        {token: log-probability} when asked for the likeliest two
    sleep       seconds of each answer
    die         starts, from the first, that end with `fault`
    fault       that the port is taken, if nothing else is said
"""

from __future__ import annotations

import itertools
import json
import os
import stat
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

IN_USE = "[Errno 98] Address already in use"


def fake_python(folder: Path, **behaviour: Any) -> Path:
    """A file to name in target.python."""
    behaviour = {"starts": str(folder / "starts.txt"), "parting": {}, "best": {}, "sleep": 0, "die": 0, "fault": IN_USE, **behaviour}
    (folder / "behaviour.json").write_text(json.dumps(behaviour))
    script = folder / "python"
    script.write_text(f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport fake_vllm\nfake_vllm.serve(__file__)\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def serve(script: str) -> None:
    behaviour = json.loads(Path(script).with_name("behaviour.json").read_text())
    words = sys.argv[1:]
    assert words[:2] == ["-m", "vllm.entrypoints.openai.api_server"], words
    values = dict(itertools.pairwise(words))
    speculative = json.loads(values["--speculative-config"]) if "--speculative-config" in values else None
    starts = Path(behaviour["starts"])
    with starts.open("a") as file:
        file.write(("draft" if speculative else "plain") + "\n")
    if len(starts.read_text().split()) <= behaviour["die"]:
        raise RuntimeError(behaviour["fault"])
    counts = {"answers": 0}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                # Each answer: 2 rounds, in which 2, 1 and 0 drafted tokens were accepted at the three positions.
                text = f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {2.0 * counts["answers"]}\n'
                for position, accepted in enumerate((2.0, 1.0, 0.0)):
                    text += f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{position}"}} {accepted * counts["answers"]}\n'
                self.reply(text.encode())
            elif self.path == "/v1/models":
                self.reply(json.dumps({"data": [{"id": values["--served-model-name"]}]}).encode())
            else:
                self.reply(json.dumps({"version": "0.0.fake"}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.headers["Authorization"] == f"Bearer {os.environ['VLLM_API_KEY']}"
            assert body["temperature"] == 0 and body["model"] == values["--served-model-name"]
            time.sleep(behaviour["sleep"])
            last = body["prompt"][-1]
            tokens = [(last + 1 + i) % 300 for i in range(body["max_tokens"])]
            if speculative and str(last) in behaviour["parting"]:
                tokens[1] = behaviour["parting"][str(last)]
            choice: dict[str, Any] = {"token_ids": tokens}
            if "logprobs" in body:
                choice["logprobs"] = {"top_logprobs": [{f"token_id:{token}": value for token, value in behaviour["best"].items()}]}
            else:
                counts["answers"] += 1
            self.reply(json.dumps({"choices": [choice]}).encode())

        def reply(self, data: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", int(values["--port"])), Handler).serve_forever()
