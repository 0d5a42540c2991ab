"""What a Cloud Storage request touches, and under which preconditions.

Covers the JSON API as the official clients speak it: upload (media, multipart, resumable),
download, metadata, patch, delete, compose, rewrite and copy.

fake-gcs-server takes names as paths of files, so that some would meet another object, another
bucket, or a file outside. They are refused here, however they come in.
"""

import json
import re
from dataclasses import dataclass, field
from email.message import Message
from typing import IO, Any
from urllib.parse import parse_qsl, unquote, urlsplit

UPLOAD = re.compile(r"(?:/resumable)?/upload/storage/v1/b/([^/]+)/o/?")
OBJECT = re.compile(r"(/download)?/storage/v1/b/([^/]+)/o/(.+)")
COMPOSE = re.compile(r"/storage/v1/b/([^/]+)/o/(.+)/compose")
REWRITE = re.compile(r"/storage/v1/b/([^/]+)/o/(.+)/(?:rewriteTo|copyTo)/b/([^/]+)/o/(.+)")
# Calls on an object that would otherwise be taken for an object of that name.
UNKNOWN_CALL = re.compile(r"/storage/v1/b/[^/]+/(?:o/.+/(moveTo)/o/.+|(?:o/.+/)?(restore))")
JSON_API = re.compile(r"(?:/resumable)?(?:/upload|/download)?/storage/v1/.*|/_internal/.*")
# Paths that end before an object's name begins: a slash at their end is none of a name's.
NAMELESS = re.compile(r"(?:(?:/resumable)?/upload)?/storage/v1/b(?:/[^/]+(?:/o)?)?/|/[^/]*/?")
NAME_LIMIT = 1024  # bytes, of the service
PART_LIMIT = 235  # bytes: 255 of a file's name without what fake-gcs-server adds while it writes
CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")
HEADER_LIMIT = 1 << 20  # bytes of a multipart upload in which its metadata must stand
# The preconditions that a request may carry in its query, and that are not kept here.
UNSUPPORTED = re.compile(r"if(Source)?Metageneration(Not)?Match")
UNSUPPORTED_HEADERS = ("if-match", "if-none-match", "x-goog-if-generation-match")


class Refused(Exception):
    """An answer in place of the server's.

    Attributes:
        status: The HTTP status.
        reason: Google's word for it.
    """

    def __init__(self, status: int, reason: str, message: str):
        super().__init__(message)
        self.status = status
        self.reason = reason


@dataclass(frozen=True)
class Condition:
    """What must hold of one object for a request to go through.

    Attributes:
        bucket: Its bucket.
        name: Its name.
        match: `ifGenerationMatch`; 0 means that it must not exist.
        not_match: `ifGenerationNotMatch`.
        generation: The one generation that the request speaks of.
        must_exist: Whether the request can only work on an existing object.
        reads: Whether it only reads.
    """

    bucket: str
    name: str
    match: int | None = None
    not_match: int | None = None
    generation: int | None = None
    must_exist: bool = False
    reads: bool = False

    @property
    def is_void(self) -> bool:
        """Whether it says nothing about generations."""
        return self.match is None and self.not_match is None and self.generation is None

    def check(self, current: int) -> None:
        """Compare with the generation of the live object, 0 when there is none.

        Raises:
            Refused: 404, 412, or 304 for a read that wants another generation.
        """
        if self.must_exist and not current:
            raise Refused(404, "notFound", f"No such object: {self.bucket}/{self.name}")
        if self.generation is not None and self.generation != current:
            text = f"No such object: {self.bucket}/{self.name}#{self.generation}"
            raise Refused(404, "notFound", text)
        if self.match is not None and self.match != current:
            raise Refused(412, "conditionNotMet", PRECONDITION)
        if self.not_match is not None and self.not_match == current:
            raise Refused(304 if self.reads else 412, "conditionNotMet", PRECONDITION)


# What fake-gcs-server answers when a file is in the way of a folder, or a folder of a file.
COLLISIONS = (b": file exists", b"is a directory", b"not a directory", b"Error running compose")
PRECONDITION = "At least one of the pre-conditions you specified did not hold."


@dataclass
class Request:
    """One request as it came in, its body on disk or in memory."""

    method: str
    target: str
    headers: Message
    body: IO[bytes]
    path: str = field(init=False)
    query: dict[str, str] = field(init=False)

    def __post_init__(self):
        parts = urlsplit(self.target)
        self.path = parts.path
        # Of two values with one key the first counts, as for fake-gcs-server.
        self.query = dict(reversed(parse_qsl(parts.query, keep_blank_values=True)))

    @property
    def reads(self) -> bool:
        return self.method in ("GET", "HEAD")

    @property
    def upload_id(self) -> str | None:
        return self.query.get("upload_id") if UPLOAD.fullmatch(self.path) else None

    @property
    def starts_upload(self) -> bool:
        """Whether it opens a resumable upload."""
        kind = self.query.get("uploadType")
        return kind == "resumable" and self.upload_id is None and self.method == "POST"

    @property
    def ends_upload(self) -> bool:
        """Whether it is the last chunk of a resumable upload."""
        match = CONTENT_RANGE.fullmatch(self.headers.get("Content-Range", ""))
        if match is None:
            return True
        _, last, total = match.groups()
        return total != "*" and (last is None or int(last) + 1 == int(total))

    def number(self, key: str) -> int | None:
        if (value := self.query.get(key)) is None:
            return None
        if not re.fullmatch(r"-?\d+", value):
            raise Refused(400, "invalid", f"Invalid value for {key}: {value}")
        return int(value)


def conditions(request: Request) -> list[Condition]:
    """The objects that a request changes, or reads under a precondition.

    A chunk of a resumable upload has none of its own: its preconditions came with the first
    request.

    Raises:
        Refused: 400 for broken preconditions and for names that cannot be kept.
    """
    if request.method == "POST" and (match := UPLOAD.fullmatch(request.path)):
        return [] if request.upload_id else [_upload(request, unquote(match[1]))]
    if request.method == "POST" and (match := COMPOSE.fullmatch(request.path)):
        return _compose(request, *map(unquote, match.groups()))
    if request.method == "POST" and (match := REWRITE.fullmatch(request.path)):
        return _rewrite(request, *map(unquote, match.groups()))
    if match := OBJECT.fullmatch(request.path):
        found = _object(request, unquote(match[2]), unquote(match[3]))
        return [] if request.reads and found.is_void else [found]
    return []


def refuse_unsupported(request: Request) -> None:
    """Let nothing through that would be taken and not kept.

    Raises:
        Refused: 501 for what the local server does not do, 400 for a name that it cannot keep.
    """
    found = [key for key in request.query if UNSUPPORTED.fullmatch(key)]
    found += [name for name in UNSUPPORTED_HEADERS if name in request.headers]
    if found:
        raise _unsupported(f"{found[0]} is")
    if request.path.startswith("/batch/"):
        raise _unsupported("Batches are")
    if request.method == "POST" and (match := UNKNOWN_CALL.fullmatch(request.path)):
        raise _unsupported(f"The call {match[1] or match[2]} is")
    if request.method in ("POST", "PUT") and not JSON_API.fullmatch(request.path):
        raise _unsupported("Writing by the XML API or an HTML form is")
    _check_path(request.path)


def _unsupported(what: str) -> Refused:
    return Refused(501, "notImplemented", f"{what} not supported by the local Cloud Storage.")


def _check_path(path: str) -> None:
    """Refuse a path with such a name, encoded or not, of an object or of a bucket."""
    if NAMELESS.fullmatch(path):
        path = path.removesuffix("/")
    if path:
        _check_parts(unquote(path)[1:])


def check_name(name: str) -> None:
    """Refuse an object's name that is not the path of one file.

    Raises:
        Refused: 400, which clients do not try again.
    """
    if len(name.encode()) > NAME_LIMIT:
        raise Refused(400, "invalid", f"An object name has at most {NAME_LIMIT} bytes.")
    _check_parts(name)


def _check_parts(name: str) -> None:
    parts = name.split("/")
    if {"", ".", ".."} & set(parts):
        text = "the local Cloud Storage takes no object name with an empty, '.' or '..' part"
    elif {"\0", "\r", "\n"} & set(name):
        text = "the local Cloud Storage takes no object name with a line end or a zero byte"
    elif any(len(part.encode()) > PART_LIMIT for part in parts):
        text = f"the local Cloud Storage takes at most {PART_LIMIT} bytes between slashes in a name"
    else:
        return
    raise Refused(400, "invalid", f"{text}: {name!r}")


def collision(content: bytes, name: str) -> Refused | None:
    """The refusal in place of a 500 that says: a file lies where a folder should be, or vice versa.

    Clients try again for minutes after a 500.
    """
    if not any(word in content for word in COLLISIONS):
        return None
    text = (
        f"the local Cloud Storage keeps objects as files: {name!r} cannot be one while an object "
        "has the name of one of its folders, or once it was itself a folder of other objects"
    )
    return Refused(400, "invalid", text)


def _object(request: Request, bucket: str, name: str) -> Condition:
    """The object that a request speaks of, which must be there."""
    return Condition(
        bucket,
        name,
        match=request.number("ifGenerationMatch"),
        not_match=request.number("ifGenerationNotMatch"),
        generation=request.number("generation"),
        must_exist=True,
        reads=request.reads,
    )


def _destination(request: Request, bucket: str, name: str) -> Condition:
    """The object that a request makes or replaces."""
    check_name(name)
    return Condition(
        bucket,
        name,
        match=request.number("ifGenerationMatch"),
        not_match=request.number("ifGenerationNotMatch"),
    )


def _upload(request: Request, bucket: str) -> Condition:
    name = request.query.get("name") or _described(request).get("name", "")
    return _destination(request, bucket, name)


def _compose(request: Request, bucket: str, name: str) -> list[Condition]:
    found = [_destination(request, bucket, name)]
    for source in _json(request.body.read()).get("sourceObjects", []):
        check_name(source.get("name", ""))
        match = source.get("objectPreconditions", {}).get("ifGenerationMatch")
        generation = source.get("generation")
        found.append(
            Condition(
                bucket,
                source["name"],
                match=None if match is None else int(match),
                generation=None if generation is None else int(generation),
                must_exist=True,
            )
        )
    return found


def _rewrite(
    request: Request, bucket: str, name: str, to_bucket: str, to_name: str
) -> list[Condition]:
    source = Condition(
        bucket,
        name,
        match=request.number("ifSourceGenerationMatch"),
        not_match=request.number("ifSourceGenerationNotMatch"),
        generation=request.number("sourceGeneration"),
        must_exist=True,
    )
    return [source, _destination(request, to_bucket, to_name)]


def _described(request: Request) -> dict[str, Any]:
    """The metadata in the body: all of it, or the first part of a multipart upload."""
    head = request.body.read(HEADER_LIMIT)
    if request.query.get("uploadType") != "multipart":
        return _json(head)
    boundary, _, rest = head.partition(b"\r\n")
    _, _, rest = rest.partition(b"\r\n\r\n")
    described, found, _ = rest.partition(b"\r\n" + boundary)
    if not found:
        raise Refused(400, "invalid", "The upload's metadata part has no end.")
    return _json(described)


def _json(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text or b"{}")
    except ValueError as error:
        raise Refused(400, "parseError", f"Parse Error: {error}") from error
    if not isinstance(value, dict):
        raise Refused(400, "parseError", "Parse Error: not an object")
    return value
