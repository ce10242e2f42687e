"""The forms in which a secret would be found in a text: raw, hex, base64, numbers, escapes."""

from __future__ import annotations

import base64
import json

PART_BYTES = 8  # 8 random bytes are nowhere by chance


def forms(secret: bytes) -> dict[str, bytes]:
    """How a secret, or any quarter of 32 bytes of it, is written: raw, hex, base64, numbers."""
    found = {}
    for begin in range(0, len(secret), PART_BYTES):
        part = secret[begin : begin + PART_BYTES]
        texts = {
            "hex": part.hex(),
            "HEX": part.hex().upper(),
            "hex with colons": part.hex(":"),
            "hex with spaces": part.hex(" "),
            "hex, backwards": part[::-1].hex(),
            "repr": repr(part)[2:-1],
            "octal": "".join(chr(b) if 32 <= b < 127 else f"\\{b:03o}" for b in part),
            "JSON": json.dumps(part.decode("latin1"))[1:-1],
            "UTF-8": part.decode("latin1"),
            "a list": ", ".join(map(str, part)),
            "numbers": " ".join(map(str, part)),
        }
        for n_before in range(3):  # bytes of something longer, which is encoded as one
            n_bits = 8 * n_before
            first, last = -(-n_bits // 6), (n_bits + 8 * len(part)) // 6
            plain = base64.b64encode(bytes(n_before) + part)[first:last].decode()
            texts[f"base64 after {n_before}"] = plain
            texts[f"base64 of URLs after {n_before}"] = plain.translate(str.maketrans("+/", "-_"))
        found |= {f"bytes {begin}+ as {how}": text.encode() for how, text in texts.items()}
        found[f"bytes {begin}+ as they are"] = part
    for order in ("little", "big"):
        found[f"a number, {order}"] = str(int.from_bytes(secret, order)).encode()
    return found
