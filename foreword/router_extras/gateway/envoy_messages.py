"""The messages of Envoy's external processing protocol and of gRPC's health protocol that a picker needs.

Only these fields are declared, with the numbers of `envoy/service/ext_proc/v3/external_processor.proto` and of the files that
it imports; decoders skip all others. The classes are made from this table when the module is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory, struct_pb2
from google.protobuf.message import DecodeError

from foreword.router_extras.gateway.grpc_server import ClientFault

_PACKAGE: Final = "foreword.gateway"
_SCALARS: Final = {"bool": 8, "string": 9, "bytes": 12, "enum": 5}
_MESSAGE: Final = 11
_OPTIONAL: Final = 1
_REPEATED: Final = 3
_TABLE: Final = {
    "HeaderValue": "1 string key, 2 string value, 3 bytes raw_value",
    "HeaderMap": "1 HeaderValue* headers",
    "HttpHeaders": "1 HeaderMap headers, 3 bool end_of_stream",
    "HttpBody": "1 bytes body, 2 bool end_of_stream",
    "HttpTrailers": "1 HeaderMap trailers",
    # On the wire a map is a list of such entries.
    "NamedStruct": "1 string key, 2 google.protobuf.Struct value",
    "Metadata": "1 NamedStruct* filter_metadata",
    "ProtocolConfiguration": "1 enum request_body_mode, 2 enum response_body_mode",
    "ProcessingRequest": "2 HttpHeaders request_headers, 3 HttpHeaders response_headers, 4 HttpBody request_body, "
    "5 HttpBody response_body, 6 HttpTrailers request_trailers, 7 HttpTrailers response_trailers, "
    "8 Metadata metadata_context, 10 bool observability_mode, 11 ProtocolConfiguration protocol_config",
    "HeaderValueOption": "1 HeaderValue header, 3 enum append_action",
    "HeaderMutation": "1 HeaderValueOption* set_headers, 2 string* remove_headers",
    "StreamedBodyResponse": "1 bytes body, 2 bool end_of_stream",
    "BodyMutation": "1 bytes body, 3 StreamedBodyResponse streamed_response",
    "CommonResponse": "2 HeaderMutation header_mutation, 3 BodyMutation body_mutation",
    "HeadersResponse": "1 CommonResponse response",
    "BodyResponse": "1 CommonResponse response",
    "TrailersResponse": "1 HeaderMutation header_mutation",
    "HttpStatus": "1 enum code",
    "ImmediateResponse": "1 HttpStatus status, 2 HeaderMutation headers, 3 bytes body",
    "ProcessingResponse": "1 HeadersResponse request_headers, 2 HeadersResponse response_headers, "
    "3 BodyResponse request_body, 4 BodyResponse response_body, 5 TrailersResponse request_trailers, "
    "6 TrailersResponse response_trailers, 7 ImmediateResponse immediate_response, "
    "8 google.protobuf.Struct dynamic_metadata, 10 google.protobuf.Duration override_message_timeout",
    "HealthCheckRequest": "1 string service",
    "HealthCheckResponse": "1 enum status",
}


def _classes() -> dict[str, Any]:
    pool: Any = descriptor_pool.DescriptorPool()
    file = descriptor_pb2.FileDescriptorProto(name="foreword/gateway.proto", package=_PACKAGE, syntax="proto3")
    for known in (struct_pb2, duration_pb2):
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
        file.dependency.append(known.DESCRIPTOR.name)
    for name, fields in _TABLE.items():
        message = file.message_type.add(name=name)
        for entry in fields.split(", "):
            number, kind, field_name = entry.split()
            base = kind.removesuffix("*")
            field: Any = message.field.add(name=field_name, number=int(number))
            field.label = _OPTIONAL if kind == base else _REPEATED
            field.type = _SCALARS.get(base, _MESSAGE)
            if field.type == _MESSAGE:
                field.type_name = f".{base}" if "." in base else f".{_PACKAGE}.{base}"
    pool.AddSerializedFile(file.SerializeToString())
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _TABLE}


_made: Final = _classes()
ProcessingRequest: Final = _made["ProcessingRequest"]
ProcessingResponse: Final = _made["ProcessingResponse"]
HealthCheckRequest: Final = _made["HealthCheckRequest"]
HealthCheckResponse: Final = _made["HealthCheckResponse"]

# ProcessingMode.BodySendMode
BUFFERED: Final = 2
FULL_DUPLEX_STREAMED: Final = 4
# HeaderValueOption.HeaderAppendAction
_OVERWRITE_OR_ADD: Final = 2


def decoder_of(kind: Any) -> Callable[[bytes], Any]:
    """A function that decodes messages of this kind. It raises ClientFault."""

    def decode(data: bytes) -> Any:
        try:
            return kind.FromString(data)
        except DecodeError:
            raise ClientFault(f"this is no {kind.DESCRIPTOR.name}") from None

    return decode


def headers_of(message: Any) -> dict[str, str]:
    """The headers in an HttpHeaders message, by lower-case name; several of one name are joined with a comma."""
    found: dict[str, str] = {}
    for header in message.headers.headers:
        value = header.raw_value.decode("latin-1") if header.raw_value else header.value
        found[header.key] = f"{found[header.key]},{value}" if header.key in found else value
    return found


def mutate(mutation: Any, changes: dict[str, str | None]) -> None:
    """Fill a HeaderMutation: None removes a header."""
    for name, value in changes.items():
        if value is None:
            mutation.remove_headers.append(name)
        else:
            option = mutation.set_headers.add(append_action=_OVERWRITE_OR_ADD)
            option.header.key, option.header.raw_value = name, value.encode("latin-1", "replace")


def metadata_of(message: Any, namespace: str, name: str) -> Any:
    """A value in the dynamic metadata that came with a message; None if it is not there."""
    for entry in message.metadata_context.filter_metadata:
        if entry.key == namespace and name in entry.value:
            return entry.value[name]
    return None
