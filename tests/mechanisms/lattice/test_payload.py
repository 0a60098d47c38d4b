"""A payload gives back every integer, is small, and is refused unless it is whole."""

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from asfl_privacy.mechanisms.lattice import SeededSource, decode, encode, plan_lattice
from asfl_privacy.mechanisms.lattice.payload import MAX_VALUES

any_int64 = st.integers(-(2**63), 2**63 - 1)
shapes = arrays.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=5)


def sealed(body):
    """A payload with this body and a right checksum."""
    return b"ASL1" + struct.pack("<I", zlib.crc32(body)) + body


@given(
    arrays.arrays(np.int64, shapes, elements=st.one_of(any_int64, st.integers(-300, 300), st.integers(-1, 1))),
    st.integers(-1000, 1000),
)
def test_what_goes_in_comes_out(integers, exponent):
    """Catches a lost sign, plane, shape or spacing; the ends of int64 too."""
    found, spacing = decode(encode(integers, spacing=2.0**exponent))
    assert found.dtype == np.int64
    assert found.shape == integers.shape
    assert (found == integers).all()
    assert spacing == 2.0**exponent


@pytest.mark.parametrize("dtype_max", [0, 1, 127, 128, 2**15, 2**31, 2**63 - 1])
def test_ends_of_every_size(dtype_max):
    integers = np.array([dtype_max, -dtype_max, -dtype_max - 1, 0])
    assert (decode(encode(integers, spacing=1.0))[0] == integers).all()
    assert (decode(encode(integers[::-2], spacing=1.0))[0] == integers[::-2]).all()


@pytest.mark.parametrize("multiplier", [1.0, 1.9])
def test_a_gaussian_release_costs_at_most_three_tenths_of_float32(multiplier):
    """The noise alone takes log2(s·√(2πe)) = 7.05 to 8.05 bits at s = 32 to 64 cells: .22 to .25 of 32 bits."""
    noise = plan_lattice("gaussian", sensitivity=2.0, noise_multiplier=multiplier, num_values=6272, clip_only=True)
    assert noise.spacing <= noise.scale / 32
    rng = np.random.default_rng(0)
    rows = np.abs(rng.normal(size=(8, 32, 14, 14)))
    rows /= np.linalg.norm(rows.reshape(8, -1), axis=1).reshape(8, 1, 1, 1)
    released = noise.release((rows / noise.spacing).astype(np.int64), SeededSource(b"payload"))
    assert len(encode(released, spacing=noise.spacing)) <= 0.3 * 4 * released.size


def test_incompressible_planes_are_stored_raw():
    integers = SeededSource(b"raw").words(4096).view(np.int64)
    assert len(encode(integers, spacing=1.0)) <= 8 * 4096 + 100


@given(st.data())
def test_any_cut_or_changed_payload_is_refused(data):
    """Catches a field that is read but not checked. The checksum finds what changed."""
    payload = encode(np.arange(-40, 40).reshape(8, 10), spacing=0.5)
    cut = data.draw(st.integers(0, len(payload) - 1))
    at, change = data.draw(st.integers(0, len(payload) - 1)), data.draw(st.integers(1, 255))
    changed = payload[:at] + bytes([payload[at] ^ change]) + payload[at + 1 :]
    for spoilt in (payload[:cut], payload + b"\0", changed):
        with pytest.raises(ValueError, match="the payload cannot be read") as refusal:
            decode(spoilt)
        assert "\n" not in str(refusal.value)


def plane(method, stored):
    return struct.pack("<BI", method, len(stored)) + stored


def deflated(plain):
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(plain) + packer.flush()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (struct.pack("<hBBI", 0, 1, 1, 4) + plane(1, deflated(bytes(10**7))), "a plane does not end where it should"),
        (struct.pack("<hBBI", 0, 1, 1, 4) + plane(1, deflated(bytes(3))), "holds 3 bytes instead of 4"),
        (struct.pack("<hBBI", 0, 1, 1, 4) + plane(1, deflated(bytes(4)) + b"x"), "does not end where it should"),
        (struct.pack("<hBBI", 0, 1, 1, 4) + plane(1, deflated(bytes(4))[:-1]), "does not end where it should"),
        (struct.pack("<hBBI", 0, 1, 1, 4) + plane(1, b"\xff\xff\xff"), "does not inflate"),
        (struct.pack("<hBBI", 0, 1, 1, 4) + plane(0, bytes(5)), "holds 5 bytes instead of 4"),
        (struct.pack("<hBBI", 0, 1, 1, 4) + plane(7, bytes(4)), "packed by method 7"),
        (struct.pack("<hBBI", 0, 1, 1, 4) + plane(0, bytes(4)) + b"x", "1 bytes are left over"),
        (struct.pack("<hBBI", 0, 1, 2, 4) + plane(0, bytes(4)), "ends within a plane"),
        (struct.pack("<hBBI", 0, 1, 1, 4) + plane(0, bytes(4))[:-1], "ends within a plane"),
        (struct.pack("<hBBI", 0, 1, 0, MAX_VALUES + 1), "more than 67108864 values"),
        (struct.pack("<hBB4I", 0, 4, 0, *[2**32 - 1] * 4), "more than 67108864 values"),
        (struct.pack("<hBB2I", 0, 2, 0, 0, 2**32 - 1), "more than 67108864 values"),
        (struct.pack("<hBBI", 0, 3, 0, 1), "ends within the shape"),
        (struct.pack("<hBB9I", 0, 9, 0, *[1] * 9), "header is out of range"),
        (struct.pack("<hBBI", 0, 1, 9, 1), "header is out of range"),
        (struct.pack("<hBBI", 1001, 1, 0, 1), "header is out of range"),
    ],
)
def test_no_made_up_payload_passes(body, message):
    """Catches a bomb (10 MB of zeros for 4 values), sizes that lie, and shapes too large: checksums are right here."""
    with pytest.raises(ValueError, match=message):
        decode(sealed(body))


def test_the_reader_sets_the_size_it_takes():
    payload = encode(np.zeros((10, 10), np.int64), spacing=1.0)
    assert decode(payload, max_values=100)[0].shape == (10, 10)
    with pytest.raises(ValueError, match="more than 99 values"):
        decode(payload, max_values=99)
    with pytest.raises(ValueError, match="too short"):
        decode(b"")
    with pytest.raises(ValueError, match="instead of b'ASL1'"):
        decode(b"ASL2" + payload[4:])


def test_wrong_arrays_are_refused():
    with pytest.raises(ValueError, match="integers are int32"):
        encode(np.zeros(3, np.int32), spacing=1.0)
    with pytest.raises(ValueError, match=r"at most 2\^26 values in 8 dimensions"):
        encode(np.zeros((1,) * 9, np.int64), spacing=1.0)
    with pytest.raises(ValueError, match=r"spacing is 0\.3"):
        encode(np.zeros(3, np.int64), spacing=0.3)
