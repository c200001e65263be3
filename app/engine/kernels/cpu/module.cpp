// The Python face of the CPU kernels: engines that compile and run programs, and what the device needs around them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>

#include "engine.h"
#include "quants.h"
#include "turn.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tandem {
namespace {

std::vector<std::string> variants() {
    std::vector<std::string> names;
    for (const Kernels *const *k = runnable_kernels(); *k; ++k) {
        names.emplace_back((*k)->name);
    }
    return names;
}

std::shared_ptr<Engine> make_engine(const std::string &variant, int n_threads, bool pin) {
    const Kernels *kernels = kernels_named(variant.c_str());
    if (!kernels) {
        throw std::invalid_argument("this machine does not run kernels named " + variant);
    }
    if (n_threads < 1) {
        throw std::invalid_argument("a team needs at least one thread");
    }
    return std::make_shared<Engine>(*kernels, n_threads, pin);
}

std::shared_ptr<Program> compile(Engine &engine, nb::bytes tensors, std::vector<int32_t> nodes) {
    if (tensors.size() % sizeof(Tensor) != 0) {
        throw std::invalid_argument("the tensor table has a broken record");
    }
    std::vector<Tensor> table(tensors.size() / sizeof(Tensor));
    std::memcpy(static_cast<void *>(table.data()), tensors.c_str(), tensors.size());
    const nb::gil_scoped_release nogil;
    return engine.compile(std::move(table), nodes);
}

char *pointer(uint64_t address) { return reinterpret_cast<char *>(address); }

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Room = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::shared_ptr<Turn> make_turn(const std::shared_ptr<Engine> &engine, const std::shared_ptr<Program> &program,
                                uint64_t base, uint64_t inputs, uint64_t inputs_bytes, uint64_t rows,
                                std::size_t n_columns, nb::bytes wishes) {
    return std::make_shared<Turn>(engine, program, Window{base, pointer(inputs), inputs_bytes}, pointer(rows), n_columns,
                                  std::string(wishes.c_str(), wishes.size()));
}

std::optional<std::string> run_turn(Turn &turn, const Bytes &items, const Room &out) {
    if (out.size() != turn.n_bytes()) {
        throw std::invalid_argument("the room has another size");
    }
    const nb::gil_scoped_release nogil;
    if (!turn.fits(items.data(), items.size())) {
        return std::nullopt;
    }
    return turn.run(items.data(), items.size(), out.data());
}

// Entries of a codebook, copied and kept for good.
void load_codebook(int32_t which, nb::bytes entries) {
    if (which < 0 || which >= static_cast<int32_t>(Codebook::COUNT)) {
        throw std::invalid_argument("there is no such codebook");
    }
    static std::vector<int8_t> kept[static_cast<int>(Codebook::COUNT)];
    std::vector<int8_t> &book = kept[which];
    if (book.empty()) {
        book.resize(entries.size());
        std::memcpy(book.data(), entries.c_str(), entries.size());
        set_codebook(static_cast<Codebook>(which), book.data());
    }
}

}  // namespace
}  // namespace tandem

NB_MODULE(_cpu, m) {
    using namespace tandem;
    nb::set_leak_warnings(false);  // an engine that a traceback holds to the end is no leak
    nb::exception<Unsupported>(m, "Unsupported", PyExc_ValueError);
    m.attr("TENSOR_BYTES") = sizeof(Tensor);
    m.def("variants", &variants, "Names of the kernels this machine can run, the fastest first.");
    m.def("load_codebook", &load_codebook, "which"_a, "entries"_a);
    nb::class_<Program>(m, "Program")
        .def("run", &Program::execute, nb::call_guard<nb::gil_scoped_release>())
        .def("profile", &Program::profile, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("scratch_bytes", &Program::scratch_bytes)
        .def_prop_ro("n_steps", &Program::n_steps)
        .def_prop_ro("n_phases", &Program::n_phases);
    nb::class_<Turn>(m, "Turn").def("run", &run_turn, "items"_a, "out"_a);
    nb::class_<Engine>(m, "Engine")
        .def(nb::new_(&make_engine), "variant"_a, "n_threads"_a, "pin"_a)
        .def("compile", &compile, "tensors"_a, "nodes"_a)
        .def("turn", &make_turn, "program"_a, "base"_a, "inputs"_a, "inputs_bytes"_a, "rows"_a, "n_columns"_a, "wishes"_a)
        .def("touch",
             [](Engine &e, uint64_t begin, uint64_t end, bool replaced) {
                 const nb::gil_scoped_release nogil;
                 e.touch(pointer(begin), pointer(end), replaced);
             },
             "begin"_a, "end"_a, "replaced"_a)
        .def("forget", [](Engine &e, uint64_t begin, uint64_t end) { e.forget(pointer(begin), pointer(end)); },
             "begin"_a, "end"_a);
}
