/* array_type.c - the type below clamor_ray.GlobalArray: numpy.ndarray with another subscript.
 *
 * Owns: the type `ArrayBase`. An index that has an array or a list in it goes to a function of Python
 * first, which may gather absent rows; every other index goes straight to NumPy. So that scalars and
 * slices cost what they cost without it, this is C: a `__getitem__` of Python takes longer than NumPy's
 * whole access. Writing to a read-only array raises NumPy's error with our advice behind it.
 *
 * Where all of a version is here no function of Python is needed either: it takes as long as NumPy for 300
 * rows. Python says so, after it has looked; it is believed for BELIEVED_NS, and then again where the rows
 * that are asked for are here, for as long as Python said. It is a hint: a touch of a block that was evicted
 * meanwhile is a fault as any other.
 *
 * Stands on the stable ABI (3.10) and on no header of NumPy's: it takes the slots of numpy.ndarray, and the
 * first field of an array, which is the same in NumPy 1 and 2. It is checked when this is imported.
 * Threads: all under the GIL; the functions are set once, when the library is imported.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030a0000
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

static PyTypeObject *ndarray;
static PyTypeObject *base_type;
static binaryfunc base_subscript;
static objobjargproc base_assign;
static PyObject *gather;    /* (array, key) -> rows, or NotImplemented */
static PyObject *explain;   /* (array) -> what an error says of an array that is read-only */

/* ------------------------------------------------------ what is here */

#define MOST_RANGES 16u
#define BELIEVED_NS 10000000u
#define SMALL_BYTES (16ull << 20)        /* to look at it costs as much as a few calls */
#define FIRST_LOOK_NS_PER_MIB 640000ull  /* a hundred times what it costs */
#define FIRST_LOOK_MOST_NS 1000000000ull

/* The first field of a numpy.ndarray. */
struct array {
    PyObject_HEAD
    char *data;
};
static bool has_data; /* as far as can be seen, arrays have it */

/* The memory of a variable's version, in this process. */
struct range {
    uintptr_t begin, end;
    bool all;                      /* of it was here when Python looked */
    uint64_t until_ns, all_until_ns; /* it is believed; at most */
    uint64_t look_ns;              /* from then on Python may look at all of it again */
    uint64_t used;
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

static struct range *range_of(PyObject *array)
{
    return has_data ? range_at((uintptr_t)((struct array *)array)->data) : NULL;
}

static bool is_here(PyObject *array)
{
    const struct range *range = range_of(array);
    return range && range->all && now_ns() < range->until_ns;
}

/* Python has found that something is not here. */
static void disbelieve(PyObject *array)
{
    struct range *range = range_of(array);
    if (range)
        range->all = false;
}

/* The range, or the one that was used longest ago in its place. */
static struct range *range_for(uintptr_t begin, uintptr_t end)
{
    struct range *oldest = &ranges[0];
    for (unsigned i = 0; i < MOST_RANGES; i++) {
        if (ranges[i].begin == begin && ranges[i].end == end)
            return &ranges[i];
        if (ranges[i].begin < end && ranges[i].end > begin) /* of a mapping that has gone */
            ranges[i] = (struct range){0};
        if (ranges[i].used < oldest->used)
            oldest = &ranges[i];
    }
    *oldest = (struct range){.begin = begin, .end = end};
    if (end - begin > SMALL_BYTES) { /* not at once: it may be opened for these rows only */
        const uint64_t later_ns = ((end - begin) >> 20) * FIRST_LOOK_NS_PER_MIB;
        oldest->look_ns = now_ns() + (later_ns < FIRST_LOOK_MOST_NS ? later_ns : FIRST_LOOK_MOST_NS);
    }
    return oldest;
}

static PyObject *believe(PyObject *module, PyObject *args)
{
    unsigned long long begin = 0, end = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "KK:believe", &begin, &end))
        return NULL;
    struct range *range = range_for((uintptr_t)begin, (uintptr_t)end);
    const uint64_t now = now_ns();
    range->used = ++n_used;
    range->until_ns = now + BELIEVED_NS < range->all_until_ns ? now + BELIEVED_NS
                                                              : range->all_until_ns;
    return PyBool_FromLong(now >= range->look_ns);
}

static PyObject *looked(PyObject *module, PyObject *args)
{
    unsigned long long begin = 0, believed_ns = 0, pause_ns = 0;
    int all = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "KpKK:looked", &begin, &all, &believed_ns, &pause_ns))
        return NULL;
    struct range *range = range_at((uintptr_t)begin);
    if (range) {
        const uint64_t now = now_ns();
        range->all = all;
        range->look_ns = now + pause_ns;
        range->all_until_ns = now + believed_ns;
        range->until_ns = now + (believed_ns < BELIEVED_NS ? believed_ns : BELIEVED_NS);
    }
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
        *range = (struct range){0};
    Py_RETURN_NONE;
}

/* Whether the field above is that of a numpy.ndarray here. */
static bool check_data(PyObject *numpy)
{
    PyObject *made = PyObject_CallMethod(numpy, "arange", "i", 6);
    PyObject *interface = made ? PyObject_GetAttrString(made, "__array_interface__") : NULL;
    PyObject *data = interface ? PyMapping_GetItemString(interface, "data") : NULL;
    PyObject *address = data ? PySequence_GetItem(data, 0) : NULL;
    const bool same = address && (uintptr_t)PyLong_AsUnsignedLongLong(address) ==
                                     (uintptr_t)((struct array *)made)->data;
    Py_XDECREF(address);
    Py_XDECREF(data);
    Py_XDECREF(interface);
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
    if (gather && !is_here(self)) {
        PyObject *rows = PyObject_CallFunctionObjArgs(gather, self, key, NULL);
        if (rows != Py_NotImplemented) {
            disbelieve(self);
            return rows;
        }
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
     "believe(begin, end): something of that memory was found to be here. Whether it is time to look at "
     "all of it."},
    {"looked", looked, METH_VARARGS,
     "looked(begin, all, believed_ns, pause_ns): whether all of that memory is here; for how long it is "
     "believed at most; how long not to look again."},
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
    has_data = check_data(numpy);
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
