"""BF16 as 16-bit words, in NumPy and in HDF5 (docs/captures.md)."""

import h5py
import numpy as np


def _bf16_type():
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_precision(16)
    kind.set_size(2)
    kind.set_ebias(127)
    return kind


BF16 = _bf16_type()


def to_float(words):
    """BF16 words (uint16) as float32, exactly."""
    return (np.asarray(words).astype(np.uint32) << 16).view(np.float32)


def round_to_words(values):
    """float32 values rounded to BF16 words, to nearest even; any NaN becomes 0x7fff."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def exact_words(values):
    """float32 values that are BF16 numbers as words. Raises ValueError where one is not."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    if np.any(bits & np.uint32(0xFFFF)):
        raise ValueError("holds values that are not BF16 numbers")
    return (bits >> 16).astype(np.uint16)


def read_words(dataset):
    """A BF16 data set of h5py as the words that stand in the file."""
    kind = dataset.id.get_type()
    if not kind.equal(BF16):
        raise ValueError(f"{dataset.file.filename}: {dataset.name} is not BF16")
    words = np.empty(dataset.shape, "<u2")
    if words.size:
        dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, words, mtype=kind)
    return words


def _chunk(shape, item_size, most=1 << 20):
    """The trailing part of a shape that is at most 1 MiB."""
    chunk = [1] * len(shape)
    size = item_size
    for axis in reversed(range(len(shape))):
        chunk[axis] = max(1, min(shape[axis], most // size))
        size *= chunk[axis]
        if chunk[axis] < shape[axis]:
            break
    return tuple(chunk)


def write_array(group, name, array, compress=0):
    """An array into a group of h5py: uint16 as BF16 words, others as they are; with checksums, and deflated at level `compress`."""
    array = np.ascontiguousarray(array)
    if array.dtype == np.uint16:
        kind = BF16
    else:
        kind = h5py.h5t.py_create(array.dtype.newbyteorder("<"), logical=True)
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_obj_track_times(False)
    if array.size:
        properties.set_chunk(_chunk(array.shape, array.dtype.itemsize))
        if compress:
            properties.set_shuffle()
            properties.set_deflate(compress)
        properties.set_fletcher32()
    dataset = h5py.h5d.create(group.id, name.encode(), kind, h5py.h5s.create_simple(array.shape), dcpl=properties)
    if array.size:
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, array, mtype=kind)
