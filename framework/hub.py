"""Whether the Hugging Face hub can be asked for a file."""

import socket
import urllib.request
from urllib.parse import urlsplit


def hub_is_reachable() -> bool:
    """Whether the hub's name resolves from here.

    Asked first, because the hub client answers a missing network with a minute of retries and one log line for each.
    Behind a proxy names need not resolve, so there the answer is yes.
    """
    from huggingface_hub import constants  # a tenth of a second, which no front room needs

    if constants.HF_HUB_OFFLINE:
        return False
    if urllib.request.getproxies():
        return True
    try:
        return bool(socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None))
    except OSError:
        return False
