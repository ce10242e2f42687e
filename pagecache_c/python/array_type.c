/* array_type.c - the type below clamor_ray.GlobalArray: numpy.ndarray with another subscript.
 *
 * Owns: the type `ArrayBase`. An index that has an array or a list in it goes to a function of Python
 * first, which may gather absent rows; every other index goes straight to NumPy. So that scalars and
 * slices cost what they cost without it, this is C: a `__getitem__` of Python takes longer than NumPy's
 * whole access. Writing to a read-only array raises NumPy's error with our advice behind it.
 *
 * Rows that were all here a moment ago need no function of Python either: it takes as long as NumPy for
 * 300 rows. What it has found to be here is noted, a bit for each block, and believed for BELIEVED_NS;
 * where all of a version is here, that is.
 * Bits are hints: nothing is wrong where one is missing, nor where one is stale (a touch of an evicted
 * block is a fault as any other).
 *
 * Stands on the stable ABI (3.10) and on no header of NumPy's: it takes the slots of numpy.ndarray, and the
 * first fields of an array, which are the same in NumPy 1 and 2. They are checked when this is imported.
 * Threads: all under the GIL; the functions are set once, when the library is imported.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030a0000
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static PyTypeObject *ndarray;
static PyTypeObject *base_type;
static binaryfunc base_subscript;
static objobjargproc base_assign;
static PyObject *gather;    /* (array, key) -> rows, or NotImplemented */
static PyObject *explain;   /* (array) -> what an error says of an array that is read-only */

/* ------------------------------------------------------ what is here */

#define BLOCK_SHIFT 12u
#define MOST_RANGES 16u
#define BELIEVED_NS 10000000u
#define WHOLE_EVERY_NS 1000000000u /* to ask about all of a range takes 1 ms for 500 MB */

/* The first fields of a numpy.ndarray, and of its dtype. */
struct array {
    PyObject_HEAD
    char *data;
    int ndim;
    Py_ssize_t *shape, *strides;
    PyObject *base;
    struct dtype *dtype;
};
struct dtype {
    PyObject_HEAD
    PyTypeObject *scalar_type;
    char kind, type, byte_order;
};
static bool has_fields; /* as far as can be seen, arrays have these */

/* The memory of a variable's version, in this process. */
struct range {
    uintptr_t begin, end;
    uint64_t until_ns, whole_ns, used; /* whole_ns: when all of it was asked about */
    bool all;                          /* of it is here */
    uint64_t *here;                    /* a bit for each block */
};
static struct range ranges[MOST_RANGES];
static uint64_t n_used;

static uint64_t now_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static struct range *range_at(uintptr_t address)
{
    for (unsigned i = 0; i < MOST_RANGES; i++)
        if (address >= ranges[i].begin && address < ranges[i].end)
            return &ranges[i];
    return NULL;
}

static void drop(struct range *range)
{
    free(range->here);
    *range = (struct range){0};
}

static size_t n_words(const struct range *range)
{
    return ((range->end - range->begin) >> BLOCK_SHIFT) / 64 + 1;
}

/* How many bytes a row has, from its first to its last; 0: its elements lie in another order. */
static Py_ssize_t row_bytes_of(const struct array *array)
{
    if (array->ndim < 1 || array->strides[0] <= 0)
        return 0;
    if (array->ndim == 1)
        return array->strides[0];
    for (int i = 1; i < array->ndim; i++)
        if (array->strides[i] <= 0 || array->strides[i] * array->shape[i] > array->strides[i - 1])
            return 0;
    return array->strides[1] * array->shape[1];
}

/* Numbers of rows, as NumPy has them: of the machine's integers, in one piece, all within the array. */
static const int64_t *ids_of(const struct array *array, PyObject *key, Py_ssize_t *n)
{
    const struct array *ids = (struct array *)key;
    if (Py_TYPE(key) != ndarray || ids->ndim != 1 || ids->strides[0] != sizeof(int64_t) ||
        (uintptr_t)ids->data % sizeof(int64_t) || ids->dtype->kind != 'i' ||
        ids->dtype->byte_order != '=')
        return NULL;
    const int64_t *numbers = (const int64_t *)ids->data, n_rows = array->shape[0];
    *n = ids->shape[0];
    bool outside = false;
    for (Py_ssize_t i = 0; i < *n; i++)
        outside |= numbers[i] >= n_rows || numbers[i] < -n_rows;
    return outside ? NULL : numbers;
}

struct rows {
    struct range *range;
    const int64_t *ids;
    Py_ssize_t n, n_rows, stride, bytes;
    uintptr_t first; /* of row 0, in the range */
};

static bool rows_of(PyObject *self, PyObject *key, struct rows *rows)
{
    const struct array *array = (struct array *)self;
    rows->range = has_fields ? range_at((uintptr_t)array->data) : NULL;
    rows->bytes = rows->range ? row_bytes_of(array) : 0;
    if (rows->bytes <= 0)
        return false;
    rows->first = (uintptr_t)array->data - rows->range->begin;
    rows->n_rows = array->shape[0];
    rows->stride = array->strides[0];
    const uintptr_t length = rows->range->end - rows->range->begin;
    if (rows->n_rows < 1 || (uintptr_t)rows->bytes > length - rows->first ||
        (uintptr_t)(rows->n_rows - 1) > (length - rows->first - (uintptr_t)rows->bytes) /
                                            (uintptr_t)rows->stride)
        return false;
    rows->ids = ids_of(array, key, &rows->n);
    return rows->ids;
}

struct blocks {
    uintptr_t first, last;
};
static inline struct blocks blocks_of(const struct rows *rows, int64_t id)
{
    const uintptr_t at = rows->first + (uintptr_t)((id < 0 ? id + rows->n_rows : id) * rows->stride);
    return (struct blocks){at >> BLOCK_SHIFT, (at + (uintptr_t)rows->bytes - 1) >> BLOCK_SHIFT};
}

static bool are_noted(const struct rows rows)
{
    const uint64_t *here = rows.range->here;
    uint64_t all = 1;
    for (Py_ssize_t i = 0; i < rows.n; i++) {
        const struct blocks of = blocks_of(&rows, rows.ids[i]);
        all &= here[of.first / 64] >> of.first % 64;
        all &= here[of.last / 64] >> of.last % 64;
        for (uintptr_t block = of.first + 1; block < of.last; block++)
            all &= here[block / 64] >> block % 64;
    }
    return all & 1u;
}

static void note(const struct rows rows)
{
    for (Py_ssize_t i = 0; i < rows.n; i++) {
        const struct blocks of = blocks_of(&rows, rows.ids[i]);
        for (uintptr_t block = of.first; block <= of.last; block++)
            rows.range->here[block / 64] |= 1ull << block % 64;
    }
}

static bool rows_are_here(PyObject *self, PyObject *key)
{
    const struct range *range = has_fields ? range_at((uintptr_t)((struct array *)self)->data) : NULL;
    struct rows rows;
    if (!range || now_ns() >= range->until_ns)
        return false;
    return range->all || (rows_of(self, key, &rows) && are_noted(rows));
}

/* The function of Python has looked. */
static void note_look(PyObject *self, PyObject *key, bool are_here)
{
    struct range *range = has_fields ? range_at((uintptr_t)((struct array *)self)->data) : NULL;
    struct rows rows;
    if (!range)
        return;
    if (!are_here || now_ns() >= range->until_ns) {
        memset(range->here, 0, n_words(range) * sizeof *range->here);
        range->all = false;
        range->until_ns = 0;
    } else if (rows_of(self, key, &rows)) {
        note(rows);
    }
}

static PyObject *believe(PyObject *module, PyObject *args)
{
    unsigned long long begin = 0, end = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "KK:believe", &begin, &end))
        return NULL;
    struct range *range = NULL, *oldest = &ranges[0];
    for (unsigned i = 0; i < MOST_RANGES; i++) {
        if (ranges[i].begin == begin && ranges[i].end == end)
            range = &ranges[i];
        else if (ranges[i].begin < end && ranges[i].end > begin) /* of a mapping that has gone */
            drop(&ranges[i]);
        if (ranges[i].used < oldest->used)
            oldest = &ranges[i];
    }
    if (!range) {
        range = oldest;
        drop(range);
        *range = (struct range){.begin = (uintptr_t)begin, .end = (uintptr_t)end};
        range->here = begin < end ? calloc(n_words(range), sizeof *range->here) : NULL;
        if (!range->here)
            drop(range); /* there is no memory, or no such range: Python looks each time */
    }
    if (!range->here)
        Py_RETURN_FALSE;
    const uint64_t now = now_ns();
    const bool asks = !range->all && (!range->whole_ns || now - range->whole_ns >= WHOLE_EVERY_NS);
    range->used = ++n_used;
    range->until_ns = now + BELIEVED_NS;
    if (asks)
        range->whole_ns = now;
    return PyBool_FromLong(asks);
}

static PyObject *believe_all(PyObject *module, PyObject *args)
{
    unsigned long long begin = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "K:believe_all", &begin))
        return NULL;
    struct range *range = range_at((uintptr_t)begin);
    if (range)
        range->all = true;
    Py_RETURN_NONE;
}

static PyObject *forget(PyObject *module, PyObject *args)
{
    unsigned long long begin = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "K:forget", &begin))
        return NULL;
    struct range *range = range_at((uintptr_t)begin);
    if (range)
        drop(range);
    Py_RETURN_NONE;
}

/* Whether the fields above are those of a numpy.ndarray here. */
static bool check_fields(PyObject *numpy)
{
    PyObject *made = PyObject_CallMethod(numpy, "arange", "iiis", 0, 6, 1, "int64");
    PyObject *grid = made ? PyObject_CallMethod(made, "reshape", "ii", 2, 3) : NULL;
    PyObject *interface = grid ? PyObject_GetAttrString(grid, "__array_interface__") : NULL;
    PyObject *data = interface ? PyMapping_GetItemString(interface, "data") : NULL;
    PyObject *address = data ? PySequence_GetItem(data, 0) : NULL;
    bool same = false;
    if (address) {
        const struct array *array = (struct array *)grid;
        same = (uintptr_t)PyLong_AsUnsignedLongLong(address) == (uintptr_t)array->data &&
               array->ndim == 2 && array->shape[0] == 2 && array->shape[1] == 3 &&
               array->strides[0] == 24 && array->strides[1] == 8 && array->dtype->kind == 'i' &&
               array->dtype->byte_order == '=';
    }
    Py_XDECREF(address);
    Py_XDECREF(data);
    Py_XDECREF(interface);
    Py_XDECREF(grid);
    Py_XDECREF(made);
    PyErr_Clear();
    return same;
}

/* -------------------------------------------------------------- indexing */

static bool is_basic(PyObject *key)
{
    const PyTypeObject *type = Py_TYPE(key);
    return type == &PyLong_Type || type == &PySlice_Type || key == Py_None || key == Py_Ellipsis;
}

static bool is_list_of_indices(PyObject *key)
{
    return !is_basic(key) && (PyList_Check(key) || PyObject_TypeCheck(key, ndarray));
}

/* Whether NumPy would copy the elements ("advanced indexing"). */
static bool is_advanced(PyObject *key)
{
    if (!PyTuple_Check(key))
        return is_list_of_indices(key);
    const Py_ssize_t n = PyTuple_Size(key);
    for (Py_ssize_t i = 0; i < n; i++)
        if (is_list_of_indices(PyTuple_GetItem(key, i)))
            return true;
    return false;
}

/* Steals `made`. What is no view of global memory is a plain array. */
static PyObject *plain(PyObject *made)
{
    if (!made || !PyObject_TypeCheck(made, base_type))
        return made;
    PyObject *view = PyObject_CallMethod(made, "view", "O", (PyObject *)ndarray);
    Py_DECREF(made);
    return view;
}

static PyObject *subscript(PyObject *self, PyObject *key)
{
    if (!is_advanced(key))
        return base_subscript(self, key);
    if (gather && !rows_are_here(self, key)) {
        PyObject *rows = PyObject_CallFunctionObjArgs(gather, self, key, NULL);
        if (rows)
            note_look(self, key, rows == Py_NotImplemented);
        if (rows != Py_NotImplemented)
            return rows;
        Py_DECREF(rows);
    }
    return plain(base_subscript(self, key));
}

/* NumPy's error, with what to do. */
static void advise(PyObject *self)
{
    PyObject *type, *value, *trace;
    if (!explain || !PyErr_ExceptionMatches(PyExc_ValueError))
        return;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *text = PyObject_CallFunctionObjArgs(explain, self, NULL);
    if (text && text != Py_None) {
        PyErr_Format(PyExc_ValueError, "%S: %S", value, text);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
    } else {
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
    }
    Py_XDECREF(text);
}

static int assign(PyObject *self, PyObject *key, PyObject *value)
{
    const int rc = base_assign(self, key, value);
    if (rc)
        advise(self);
    return rc;
}

/* x += y and the like. */
#define IN_PLACE(name)                                                        \
    static binaryfunc base_##name;                                            \
    static PyObject *in_place_##name(PyObject *self, PyObject *other)         \
    {                                                                         \
        PyObject *made = base_##name(self, other);                            \
        if (!made)                                                            \
            advise(self);                                                     \
        return made;                                                          \
    }                                                                         \
    static binaryfunc base_##name
IN_PLACE(add);
IN_PLACE(subtract);
IN_PLACE(multiply);
IN_PLACE(true_divide);
IN_PLACE(floor_divide);
IN_PLACE(remainder);
IN_PLACE(and);
IN_PLACE(or);
IN_PLACE(xor);

static bool has_no_axes(PyObject *array)
{
    PyObject *ndim = PyObject_GetAttrString(array, "ndim");
    const bool none = ndim && PyLong_AsLong(ndim) == 0;
    Py_XDECREF(ndim);
    PyErr_Clear();
    return none;
}

/* What a ufunc made of such arrays is a plain array, and a number where NumPy makes one. NumPy 1 does not
 * say where that is: it is so wherever nothing was given to write to, and there are no axes. */
static PyObject *array_wrap(PyObject *self, PyObject *args)
{
    PyObject *made = NULL, *context = NULL, *returns_scalar = NULL;
    if (!PyArg_ParseTuple(args, "O|OO:__array_wrap__", &made, &context, &returns_scalar))
        return NULL;
    if (made != self && PyObject_TypeCheck(made, ndarray)) {
        const int scalar = returns_scalar ? PyObject_IsTrue(returns_scalar) : has_no_axes(made);
        if (scalar < 0)
            return NULL;
        if (scalar) {
            PyObject *nothing = PyTuple_New(0);
            PyObject *number = nothing ? base_subscript(made, nothing) : NULL;
            Py_XDECREF(nothing);
            return number;
        }
    }
    Py_INCREF(made);
    return made == self ? made : plain(made); /* x += y is x still */
}

static PyMethodDef array_methods[] = {
    {"__array_wrap__", array_wrap, METH_VARARGS, "Results of ufuncs are plain arrays."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_mp_subscript, subscript},
    {Py_mp_ass_subscript, assign},
    {Py_nb_inplace_add, in_place_add},
    {Py_nb_inplace_subtract, in_place_subtract},
    {Py_nb_inplace_multiply, in_place_multiply},
    {Py_nb_inplace_true_divide, in_place_true_divide},
    {Py_nb_inplace_floor_divide, in_place_floor_divide},
    {Py_nb_inplace_remainder, in_place_remainder},
    {Py_nb_inplace_and, in_place_and},
    {Py_nb_inplace_or, in_place_or},
    {Py_nb_inplace_xor, in_place_xor},
    {Py_tp_methods, array_methods},
    {0, NULL},
};

static PyType_Spec spec = {
    "clamor_ray._array_type.ArrayBase", 0, 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots,
};

static PyObject *set_functions(PyObject *module, PyObject *args)
{
    PyObject *new_gather, *new_explain;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO:set_functions", &new_gather, &new_explain))
        return NULL;
    Py_INCREF(new_gather);
    Py_INCREF(new_explain);
    Py_XDECREF(gather);
    Py_XDECREF(explain);
    gather = new_gather;
    explain = new_explain;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"set_functions", set_functions, METH_VARARGS,
     "set_functions(gather, explain): (array, key) -> rows or NotImplemented; (array) -> text or None."},
    {"believe", believe, METH_VARARGS,
     "believe(begin, end): what gather finds to be in that memory is, for a moment, believed to be. "
     "Whether it is time to ask about all of it."},
    {"believe_all", believe_all, METH_VARARGS, "believe_all(begin): all of that memory is here."},
    {"forget", forget, METH_VARARGS, "forget(begin): nothing is believed of that memory any more."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "clamor_ray._array_type", NULL, -1, functions, NULL, NULL, NULL, NULL,
};

/* A slot of numpy.ndarray; NULL and an error where it has none. */
static void *slot_of(int slot)
{
    void *found = PyType_GetSlot(ndarray, slot);
    if (!found)
        PyErr_Format(PyExc_ImportError, "numpy.ndarray has no slot %d", slot);
    return found;
}

static bool take_slots(void)
{
    return (base_subscript = (binaryfunc)slot_of(Py_mp_subscript)) &&
           (base_assign = (objobjargproc)slot_of(Py_mp_ass_subscript)) &&
           (base_add = (binaryfunc)slot_of(Py_nb_inplace_add)) &&
           (base_subtract = (binaryfunc)slot_of(Py_nb_inplace_subtract)) &&
           (base_multiply = (binaryfunc)slot_of(Py_nb_inplace_multiply)) &&
           (base_true_divide = (binaryfunc)slot_of(Py_nb_inplace_true_divide)) &&
           (base_floor_divide = (binaryfunc)slot_of(Py_nb_inplace_floor_divide)) &&
           (base_remainder = (binaryfunc)slot_of(Py_nb_inplace_remainder)) &&
           (base_and = (binaryfunc)slot_of(Py_nb_inplace_and)) &&
           (base_or = (binaryfunc)slot_of(Py_nb_inplace_or)) &&
           (base_xor = (binaryfunc)slot_of(Py_nb_inplace_xor));
}

PyMODINIT_FUNC PyInit__array_type(void);
PyMODINIT_FUNC PyInit__array_type(void)
{
    PyObject *numpy = PyImport_ImportModule("numpy"), *bases = NULL, *type = NULL, *made = NULL;
    if (!numpy)
        return NULL;
    ndarray = (PyTypeObject *)PyObject_GetAttrString(numpy, "ndarray");
    if (!ndarray || !take_slots())
        goto out;
    has_fields = check_fields(numpy);
    bases = PyTuple_Pack(1, (PyObject *)ndarray);
    type = bases ? PyType_FromSpecWithBases(&spec, bases) : NULL;
    made = type ? PyModule_Create(&module) : NULL;
    if (made && PyModule_AddObjectRef(made, "ArrayBase", type)) {
        Py_DECREF(made);
        made = NULL;
    }
    base_type = (PyTypeObject *)type;
out:
    Py_XDECREF(bases);
    Py_DECREF(numpy);
    return made; /* the types stay for as long as the process */
}
