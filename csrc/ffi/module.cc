// The Python module: handlers for `jax.ffi.register_ffi_target`, and functions of plain buffers for reading files.
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstring>
#include <string>
#include <vector>

#include "ffi/handlers.h"
#include "ffi/separate.h"

namespace {

// A buffer of a Python object, as long as this is alive.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  ~Buffer() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }
  bool Get(PyObject* object, int flags) { return PyObject_GetBuffer(object, &view_, flags) == 0; }
  uint8_t* data() const { return static_cast<uint8_t*>(view_.buf); }
  int64_t size() const { return view_.len; }

 private:
  Py_buffer view_{};
};

int AddHandler(PyObject* handlers, const char* name, XLA_FFI_Handler* handler) {
  PyObject* capsule = PyCapsule_New(reinterpret_cast<void*>(handler), nullptr, nullptr);
  if (capsule == nullptr) return -1;
  const int failed = PyDict_SetItemString(handlers, name, capsule);
  Py_DECREF(capsule);
  return failed;
}

PyObject* Registrations(PyObject*, PyObject*) {
  PyObject* handlers = PyDict_New();
  if (handlers == nullptr) return nullptr;
  if (AddHandler(handlers, "eformer_matmul", eformer::MatmulHandler()) < 0 ||
      AddHandler(handlers, "eformer_matmuls", eformer::MatmulsHandler()) < 0 ||
      AddHandler(handlers, "eformer_decode", eformer::DecodeHandler()) < 0 ||
      AddHandler(handlers, "eformer_segments", eformer::SegmentsHandler()) < 0) {
    Py_DECREF(handlers);
    return nullptr;
  }
  return handlers;
}

PyObject* TupleOf(const std::vector<const char*>& names) {
  PyObject* found = PyTuple_New(static_cast<Py_ssize_t>(names.size()));
  for (size_t i = 0; found != nullptr && i < names.size(); ++i) {
    PyTuple_SetItem(found, static_cast<Py_ssize_t>(i), PyUnicode_FromString(names[i]));
  }
  return found;
}

PyObject* InstructionSets(PyObject*, PyObject*) { return TupleOf(eformer::InstructionSets()); }

PyObject* Formats(PyObject*, PyObject*) { return TupleOf(eformer::Formats()); }

PyObject* Moves(PyObject*, PyObject*) { return TupleOf(eformer::Moves()); }

// separate(blocks, block_bytes, moves), each move a tuple of its name, its first byte, its bytes, and the result.
PyObject* Separate(PyObject*, PyObject* args) {
  PyObject *source, *list;
  long long block_bytes;
  if (!PyArg_ParseTuple(args, "OLO!", &source, &block_bytes, &PyTuple_Type, &list)) return nullptr;
  Buffer blocks;
  if (!blocks.Get(source, PyBUF_C_CONTIGUOUS)) return nullptr;
  const Py_ssize_t count = PyTuple_Size(list);
  std::vector<Buffer> results(count);
  std::vector<eformer::Move> moves;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject *move = PyTuple_GetItem(list, i), *result;
    const char* how;
    long long first, bytes;
    if (!PyTuple_Check(move)) return PyErr_Format(PyExc_TypeError, "a move is a tuple");
    if (!PyArg_ParseTuple(move, "sLLO", &how, &first, &bytes, &result)) return nullptr;
    if (!results[i].Get(result, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)) return nullptr;
    moves.push_back({how, first, bytes, results[i].data(), results[i].size()});
  }
  std::string wrong;
  Py_BEGIN_ALLOW_THREADS;
  wrong = eformer::Separate(blocks.data(), blocks.size(), block_bytes, moves);
  Py_END_ALLOW_THREADS;
  if (!wrong.empty()) return PyErr_Format(PyExc_ValueError, "%s", wrong.c_str());
  Py_RETURN_NONE;
}

// texts(data, at, number): `number` texts from byte `at` on, each after its length in 8 bytes, and the byte after them;
// None if the data ends before.
PyObject* Texts(PyObject*, PyObject* args) {
  PyObject* source;
  Py_ssize_t at, number;
  if (!PyArg_ParseTuple(args, "Onn", &source, &at, &number)) return nullptr;
  Buffer data;
  if (!data.Get(source, PyBUF_C_CONTIGUOUS)) return nullptr;
  const int64_t size = data.size();
  if (at < 0 || at > size || number < 0 || number > (size - at) / 8) Py_RETURN_NONE;
  PyObject* found = PyList_New(number);
  for (Py_ssize_t i = 0; found != nullptr && i < number; ++i) {
    uint64_t length = 0;
    const bool is_there = size - at >= 8;
    for (int j = 0; is_there && j < 8; ++j) length |= uint64_t{data.data()[at + j]} << (8 * j);
    if (!is_there || length > static_cast<uint64_t>(size - at - 8)) {
      Py_DECREF(found);
      Py_RETURN_NONE;
    }
    const char* start = reinterpret_cast<const char*>(data.data()) + at + 8;
    PyObject* text = PyUnicode_DecodeUTF8(start, static_cast<Py_ssize_t>(length), "surrogateescape");
    if (text == nullptr) {
      Py_DECREF(found);
      return nullptr;
    }
    PyList_SetItem(found, i, text);
    at += 8 + static_cast<Py_ssize_t>(length);
  }
  return found == nullptr ? nullptr : Py_BuildValue("(Nn)", found, at);
}

PyMethodDef kMethods[] = {
    {"registrations", Registrations, METH_NOARGS, "Capsules of the handlers, by the names to register them under."},
    {"instruction_sets", InstructionSets, METH_NOARGS, "What this processor can run, the best first."},
    {"formats", Formats, METH_NOARGS, "The formats that this build knows."},
    {"moves", Moves, METH_NOARGS, "The names of moves that `separate` does."},
    {"separate", Separate, METH_VARARGS, "Write codes and scales of blocks to arrays of their own."},
    {"texts", Texts, METH_VARARGS, "Texts one after the other, each after its length."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT,
                       "_native",
                       "Matmuls of quantized arrays on CPU, and reading them from files.",
                       0,
                       kMethods,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&kModule); }
