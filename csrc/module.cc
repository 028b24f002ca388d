// The Python module: handlers for `jax.ffi.register_ffi_target`.
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "handlers.h"

namespace {

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

PyMethodDef kMethods[] = {
    {"registrations", Registrations, METH_NOARGS, "Capsules of the handlers, by the names to register them under."},
    {"instruction_sets", InstructionSets, METH_NOARGS, "What this processor can run, the best first."},
    {"formats", Formats, METH_NOARGS, "The formats that this build knows."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT,
                       "_native",
                       "Matmuls of quantized arrays on CPU.",
                       0,
                       kMethods,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&kModule); }
