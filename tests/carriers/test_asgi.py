"""What a server is given by the data plane as an ASGI application."""

from __future__ import annotations

from gateway.carriers.asgi import PIECE, Client, Message


async def test_a_long_answer_is_given_in_pieces_so_that_each_shows_that_the_client_reads() -> None:
    given: list[Message] = []

    async def send(message: Message) -> None:
        given.append(message)

    body = bytes(range(256)) * 1000
    client = Client()
    client.reply(200, b"", body)
    assert await client.pump(send)
    head, *pieces = given
    assert dict(head["headers"])[b"content-length"] == b"%d" % len(body)
    assert max(len(piece["body"]) for piece in pieces) == PIECE
    assert b"".join(piece["body"] for piece in pieces) == body
    assert [piece["more_body"] for piece in pieces] == [True] * (len(pieces) - 1) + [False]
