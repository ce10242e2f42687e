// A pybind11 module around a structure of pointers: what a user's own C++ wrapper looks like.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>

namespace py = pybind11;

using Counts = std::map<std::string, std::int64_t>;

class Words {
  public:
    explicit Words(int n_words) : counts_(new Counts, std::default_delete<Counts>()) {
        for (int i = 0; i < n_words; i++)
            (*counts_)["a word that is too long to lie in its string " + std::to_string(i)] = i;
    }
    // One that lies in a region, and belongs to nobody here.
    static Words at(std::uintptr_t address) {
        return Words(std::shared_ptr<Counts>(reinterpret_cast<Counts *>(address), [](Counts *) {}));
    }
    std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(counts_.get()); }
    std::int64_t sum() const {
        std::int64_t sum = 0;
        for (const auto &entry : *counts_)
            sum += entry.second;
        return sum;
    }
    void set(const std::string &word, std::int64_t count) { (*counts_)[word] = count; }

  private:
    explicit Words(std::shared_ptr<Counts> counts) : counts_(std::move(counts)) {}
    std::shared_ptr<Counts> counts_;
};

PYBIND11_MODULE(words, module) {
    py::class_<Words>(module, "Words")
        .def(py::init<int>())
        .def_static("at", &Words::at)
        .def_property_readonly("address", &Words::address)
        .def("sum", &Words::sum)
        .def("set", &Words::set);
}
