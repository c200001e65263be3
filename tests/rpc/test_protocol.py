"""The codec: every command and answer survives whole, byte by byte and with bytes behind it; nothing wrong passes."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import LocalProtocolError, RemoteProtocolError
from app.rpc import messages as m
from app.rpc.protocol import AnswerParser, RequestParser, encode, encode_answer, encode_error_notice
from app.rpc.specs import SPECS, decode_answer
from app.rpc.wire import TENSOR, TENSOR_BYTES, TENSOR_VALUES, Command, RpcTensor, region

VERSIONS = list(SPECS)
TENSOR_A = RpcTensor(
    id=7, type=12, buffer=0xB0F, ne=(256, 2, 3, 4), nb=(144, 144, 288, 864), op=29,
    params=tuple(range(-8, 8)), flags=16, src=tuple(range(1, 11)), view_src=3, view_offs=1 << 40, data=0xDEADBEEF,
    name=b"blk.0.attn_q.weight", use_count=2,
)  # fmt: skip
GRAPH = memoryview(struct.pack("<IQI", 1, 7, 1) + TENSOR.pack(*TENSOR_A.values()))
BULK = bytes(range(256)) * 3

#: One of every request, with its open tail and its bulk data.
REQUESTS: list[tuple[Any, bytes]] = [
    (m.Hello(), b""),
    (m.AllocBuffer(1, 1 << 40), b""),
    (m.GetAlignment(2), b""),
    (m.GetMaxSize(3), b""),
    (m.BufferGetBase(0xB0F), b""),
    (m.FreeBuffer(0xB0F), b""),
    (m.BufferClear(0xB0F, 255), b""),
    (m.SetTensor(TENSOR_A, 1, 64), BULK),
    (m.SetTensorHash(TENSOR_A, 64, (1 << 64) - 1), b""),
    (m.GetTensor(TENSOR_A, 64, 128), b""),
    (m.CopyTensor(TENSOR_A, region(1, 2, 3)), b""),
    (m.GetDeviceMemory(0), b""),
    (m.InitTensor(TENSOR_A), b""),
    (m.GetAllocSize(0, TENSOR_A, (TENSOR_A,) + (RpcTensor(),) * 9), b""),
    (m.DeviceCount(), b""),
    (m.GraphRecompute(1), b""),
    (m.MemsetTensor(TENSOR_A, 1, 2, 3), b""),
    (m.GraphCompute(1, GRAPH), bytes(GRAPH)),
    (m.Describe(), b""),
    (m.GraphStore(1, 99, GRAPH), bytes(GRAPH)),
    (m.GraphRun(1, 99), b""),
    (m.GraphDrop(1, 99), b""),
    (m.WriteBatch(memoryview(BULK)), BULK),
    (m.WriteMask(0xDEADBEEF, memoryview(BULK)), BULK),
    (m.ReadRegion(0xDEADBEEF, 64), b""),
    (m.ReadRows(0xDEADBEEF, 32_000, memoryview(BULK)), BULK),
    (m.TakeTurn(1, 99, 0xDEADBEEF, 32_000, 4, memoryview(BULK)), BULK),
    (m.Ping(42), b""),
    (m.AuthChallenge(b"n" * 32), b""),
    (m.AuthProve(b"p" * 32), b""),
    (m.PushAccept(1), b""),
    (m.PushConnect(1, b"t" * 32, memoryview(b"host:1")), b"host:1"),
    (m.PushAttach(b"t" * 32), b""),
    (m.Push(1, 2, 0xDEADBEEF, 64), b""),
    (m.PushTurn(1, 99, 0xDEADBEEF, 64, 1, 2, memoryview(BULK)), BULK),
    (m.PushTake(1, 2, 0xDEADBEEF, 64), b""),
    (m.PushData(2), BULK),
]
STREAMED = (m.SetTensor, m.PushData)
IDS = [type(request).__name__ for request, _ in REQUESTS]


def frame(request: Any, tail: bytes, version: tuple[int, int]) -> bytes:
    return encode(request, version, len(tail)) + tail


def greeted(version: tuple[int, int], **limits: int) -> RequestParser:
    """A parser that has had its HELLO."""
    parser = RequestParser(version, **limits)
    parser.feed(encode(m.Hello(), version))
    assert parser.next_request() == m.Hello()
    return parser


def parser_for(request: Any, version: tuple[int, int]) -> RequestParser:
    return RequestParser(version) if isinstance(request, m.Hello) else greeted(version)


def seen(request: Any, version: tuple[int, int]) -> Any:
    """What the far end gets to see: 6.0 has no cache flag."""
    return (
        m.SetTensor(request.tensor, 0, request.offset)
        if isinstance(request, m.SetTensor) and version == (6, 0)
        else request
    )


def take(parser: RequestParser) -> bytes:
    data = bytes(parser.take_payload(1 << 30))
    assert parser.payload_left == 0
    return data


def test_sizes_of_the_wire() -> None:
    assert TENSOR_BYTES == 296
    assert TENSOR_VALUES == 44
    specs = SPECS[7, 0]
    sizes = {c: specs[c].request.fixed_bytes for c in Command if c < 128}
    assert sizes == {
        Command.ALLOC_BUFFER: 12, Command.GET_ALIGNMENT: 4, Command.GET_MAX_SIZE: 4, Command.BUFFER_GET_BASE: 8,
        Command.FREE_BUFFER: 8, Command.BUFFER_CLEAR: 9, Command.SET_TENSOR: 305, Command.SET_TENSOR_HASH: 312,
        Command.GET_TENSOR: 312, Command.COPY_TENSOR: 592, Command.GRAPH_COMPUTE: 4, Command.GET_DEVICE_MEMORY: 4,
        Command.INIT_TENSOR: 296, Command.GET_ALLOC_SIZE: 3260, Command.HELLO: 24, Command.DEVICE_COUNT: 0,
        Command.GRAPH_RECOMPUTE: 4, Command.MEMSET_TENSOR: 313,
    }  # fmt: skip
    assert SPECS[6, 0][Command.SET_TENSOR].request.fixed_bytes == 304
    hello = specs[Command.HELLO].answer
    assert hello is not None and hello.fixed_bytes == 28


def test_every_command_has_a_request_here() -> None:
    assert {request.command for request, _ in REQUESTS} == set(Command)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("request_", "tail"), REQUESTS, ids=IDS)
def test_whole(request_: Any, tail: bytes, version: tuple[int, int]) -> None:
    parser = parser_for(request_, version)
    parser.feed(frame(request_, tail, version))
    assert parser.next_request() == seen(request_, version)
    if isinstance(request_, STREAMED):
        assert take(parser) == tail
    assert parser.next_request() is None
    assert not parser.mid_request


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("request_", "tail"), REQUESTS, ids=IDS)
def test_byte_by_byte(request_: Any, tail: bytes, version: tuple[int, int]) -> None:
    parser = parser_for(request_, version)
    data = frame(request_, tail, version)
    body_ends = len(data) - (len(tail) if isinstance(request_, STREAMED) else 0)
    for i in range(body_ends - 1):
        parser.feed(data[i : i + 1])
        assert parser.next_request() is None
        assert parser.mid_request
    parser.feed(data[body_ends - 1 : body_ends])
    assert parser.next_request() == seen(request_, version)
    taken = bytearray()
    for i in range(body_ends, len(data)):
        parser.feed(data[i : i + 1])
        taken += parser.take_payload(1 << 30)
    assert parser.payload_left == 0
    assert bytes(taken) == data[body_ends:]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("request_", "tail"), REQUESTS, ids=IDS)
def test_with_bytes_behind(request_: Any, tail: bytes, version: tuple[int, int]) -> None:
    parser = parser_for(request_, version)
    parser.feed(frame(request_, tail, version) + frame(m.Ping(1), b"", version) + b"\x03\x08")
    assert parser.next_request() == seen(request_, version)
    if isinstance(request_, STREAMED):
        assert take(parser) == tail
    assert parser.next_request() == m.Ping(1)
    assert parser.next_request() is None
    assert parser.mid_request


def test_payload_may_pass_the_parser_by() -> None:
    parser = greeted((7, 0))
    request = m.SetTensor(TENSOR_A, 0, 0)
    parser.feed(encode(request, (7, 0), 1000) + b"x" * 10)
    assert parser.next_request() == request
    assert parser.payload_left == 1000
    assert bytes(parser.take_payload(4)) == b"xxxx"
    with pytest.raises(LocalProtocolError, match="must be taken first"):
        parser.next_request()
    with pytest.raises(LocalProtocolError):
        parser.passed(10)  # six bytes are still in the buffer
    assert bytes(parser.take_payload(100)) == b"xxxxxx"
    parser.passed(990)
    parser.feed(frame(m.Ping(1), b"", (7, 0)))
    assert parser.next_request() == m.Ping(1)


def test_only_the_first_byte_is_needed_to_refuse_a_stranger() -> None:
    for first in (b"G", b"\x16", b"\xff", b"\x00", b"\x0f"):
        parser = RequestParser((7, 0))
        parser.feed(first)
        with pytest.raises(RemoteProtocolError):
            parser.next_request()


def test_hello_comes_once() -> None:
    parser = greeted((7, 0))
    parser.feed(encode(m.Hello(), (7, 0)))
    with pytest.raises(RemoteProtocolError, match="twice"):
        parser.next_request()


@pytest.mark.parametrize(
    ("command", "size"),
    [
        (Command.ALLOC_BUFFER, 11),
        (Command.ALLOC_BUFFER, 13),
        (Command.ALLOC_BUFFER, 1 << 40),
        (Command.SET_TENSOR, 304),
        (Command.GRAPH_COMPUTE, 3),
        (Command.GRAPH_COMPUTE, 1 << 62),
        (Command.DEVICE_COUNT, 1),
        (Command.WRITE_BATCH, 1 << 40),
        (Command.GRAPH_STORE, 11),
    ],
)
def test_a_wrong_size_is_refused_from_the_header_alone(command: Command, size: int) -> None:
    parser = greeted((7, 0))
    parser.feed(struct.pack("<BQ", command, size))
    with pytest.raises(RemoteProtocolError, match=command.name):
        parser.next_request()


def test_an_error_poisons() -> None:
    parser = greeted((7, 0))
    parser.feed(b"\x63")
    with pytest.raises(RemoteProtocolError, match="unknown command 99"):
        parser.next_request()
    with pytest.raises(RemoteProtocolError, match="unknown command 99"):
        parser.next_request()


def test_memory_grows_with_what_arrives_and_not_with_what_is_announced() -> None:
    parser = greeted((7, 0))
    parser.feed(struct.pack("<BQ", Command.GRAPH_COMPUTE, 60 << 20))
    for _ in range(100):
        assert parser.next_request() is None
        assert len(parser.space()) < 4 << 20
        parser.feed(bytes(10_000))
    assert len(parser.space()) < 4 << 20


# -- answers ------------------------------------------------------------------------------------------------------

ANSWERS = [
    (Command.HELLO, m.HelloAnswer(7, 0, 0, 0x54)),
    (Command.ALLOC_BUFFER, m.Allocated(0xB0F, 1 << 33)),
    (Command.GET_ALIGNMENT, m.Value(32)),
    (Command.SET_TENSOR_HASH, m.Value(1)),
    (Command.GET_DEVICE_MEMORY, m.MemoryAnswer(1 << 33, 1 << 34)),
    (Command.DEVICE_COUNT, m.Value(3)),
]


def begin(parser: AnswerParser, command: Command) -> int | None:
    size = SPECS[7, 0][command].answer_bytes
    assert isinstance(size, int)
    return parser.begin(command.name, size, size)


@pytest.mark.parametrize(("command", "answer"), ANSWERS, ids=[command.name for command, _ in ANSWERS])
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_answers(command: Command, answer: Any, step: int) -> None:
    spec = SPECS[7, 0][command]
    assert spec.answer is not None
    data = encode_answer(spec.answer, answer) + encode_answer(spec.answer, answer) + b"\x01"
    parser = AnswerParser()
    got = []
    size = None
    for i in range(0, len(data), step):
        parser.feed(data[i : i + step])
        while True:
            if size is None:
                size = begin(parser, command)
            body = None if size is None else parser.take_body(size)
            if body is None:
                break
            got.append(decode_answer(spec, body))
            size = None
    assert got == [answer, answer]


def test_what_an_http_server_says_is_not_an_answer() -> None:
    parser = AnswerParser()
    parser.feed(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(RemoteProtocolError, match="announces 3543824036068086856 bytes, allowed are 28"):
        begin(parser, Command.HELLO)


@pytest.mark.parametrize("step", [1, 1000])
def test_an_error_notice_is_read_only_where_it_was_agreed_on(step: int) -> None:
    notice = encode_error_notice("device 7 does not exist")
    parser = AnswerParser()
    parser.understands_notices = True
    with pytest.raises(RemoteProtocolError, match="the worker says: device 7 does not exist"):
        for i in range(0, len(notice), step):
            parser.feed(notice[i : i + step])
            assert begin(parser, Command.GET_ALIGNMENT) is None
    plain = AnswerParser()
    plain.feed(notice)
    with pytest.raises(RemoteProtocolError, match="announces 18446744073709551615"):
        begin(plain, Command.GET_ALIGNMENT)


# -- any values ---------------------------------------------------------------------------------------------------

U8, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (8, 32, 64))
I32 = st.integers(-(1 << 31), (1 << 31) - 1)
TENSORS = st.builds(
    RpcTensor,
    id=U64,
    type=U32,
    buffer=U64,
    ne=st.tuples(U32, U32, U32, U32),
    nb=st.tuples(U32, U32, U32, U32),
    op=U32,
    params=st.tuples(*[I32] * 16),
    flags=I32,
    src=st.tuples(*[U64] * 10),
    view_src=U64,
    view_offs=U64,
    data=U64,
    name=st.binary(max_size=63).filter(lambda name: b"\0" not in name),
    use_count=I32,
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "I": U32,
    "Q": U64,
    "B": U8,
    "T": TENSORS,
    "24s": st.binary(min_size=24, max_size=24),
    "32s": st.binary(min_size=32, max_size=32),
}


@st.composite
def any_request(draw: st.DrawFn) -> tuple[Any, bytes]:
    spec = SPECS[7, 0][draw(st.sampled_from(list(Command)))]
    tail = draw(st.binary(max_size=300)) if spec.request.has_tail or spec.streams else b""
    values: list[Any] = []
    for code in spec.request.codes:
        if code == "*":
            values.append(memoryview(tail))
        elif code == "10T":
            values.append(tuple(draw(TENSORS) for _ in range(10)))
        else:
            values.append(draw(FIELDS[code]))
    return spec.request.message_type(*values), tail


@settings(max_examples=150, deadline=None)
@given(any_request(), st.lists(st.integers(1, 500), max_size=20))
def test_any_request_in_any_pieces(what: tuple[Any, bytes], cuts: list[int]) -> None:
    request, tail = what
    parser = parser_for(request, (7, 0))
    data = memoryview(frame(request, tail, (7, 0)))
    got, taken = None, bytearray()
    for n in [*cuts, len(data)]:
        parser.feed(data[:n])
        data = data[n:]
        if got is None:
            got = parser.next_request()
            if isinstance(got, m.GraphCompute | m.GraphStore | m.WriteBatch | m.WriteMask | m.PushConnect):
                assert got == request  # its views live until the next feed
        taken += parser.take_payload(1 << 30)
    assert got is not None and got.command == request.command
    if not spec_has_tail(request):
        assert got == request
    assert bytes(taken) == (tail if isinstance(request, STREAMED) else b"")


def spec_has_tail(request: Any) -> bool:
    return SPECS[7, 0][request.command].request.has_tail


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=2000))
def test_no_bytes_do_more_than_be_refused(data: bytes) -> None:
    parser = greeted((7, 0))
    parser.feed(data)
    try:
        while parser.next_request() is not None:
            parser.take_payload(1 << 30)
            if parser.payload_left:
                break
    except RemoteProtocolError:
        pass
