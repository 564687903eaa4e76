"""Check whether the Hugging Face hub can be reached."""

import socket
import urllib.request
from urllib.parse import urlsplit


def hub_is_reachable() -> bool:
    """Whether the hub's name resolves from here.

    Checked first, because without a network the hub client retries for a minute and logs each attempt. Behind a proxy
    names need not resolve, so the answer is yes there.
    """
    from huggingface_hub import constants  # a tenth of a second, saved if not needed

    if constants.HF_HUB_OFFLINE:
        return False
    if urllib.request.getproxies():
        return True
    try:
        return bool(socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None))
    except OSError:
        return False
