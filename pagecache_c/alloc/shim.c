/* shim.c - other people's allocations, led into an arena: C functions bound to the thread's current
 * arena, NumPy's memory handler (NEP 49), and libraries that call malloc themselves, whose imports
 * are pointed here.
 *
 * Imports once patched stay patched: a block that was made in an arena may be freed at any time
 * later, and must then be known for what it is. Outside of pc_arena_enter everything new comes from
 * the process's own malloc. This library itself, and whatever is not patched, never sees an arena.
 *
 * Relies on: an address in the global window is never one of the process's malloc; glibc writes
 * the loaded addresses into the dynamic section; a slot is one aligned pointer, stored at once.
 */
#include "alloc/arena.h"
#include "common/error.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static _Thread_local pc_arena *current;

PC_API pc_arena *pc_arena_enter(pc_arena *arena)
{
    pc_arena *previous = current;
    current = arena;
    return previous;
}

/* -------------------------------------------- an arena, or the process's malloc */

static bool takes(const pc_arena *arena)
{
    return arena && pc__arena_is_open(arena);
}

static void *malloc_in(pc_arena *arena, size_t n_bytes)
{
    return takes(arena) ? pc_malloc(arena, n_bytes) : malloc(n_bytes);
}

static void *calloc_in(pc_arena *arena, size_t n_items, size_t item_bytes)
{
    return takes(arena) ? pc_calloc(arena, n_items, item_bytes) : calloc(n_items, item_bytes);
}

static void free_anywhere(void *pointer)
{
    pc_arena *owner;
    switch (pc__arena_hold(pointer, &owner)) {
    case PC__OWNER_REAL:
        free(pointer);
        break;
    case PC__OWNER_LOST:
        break;
    case PC__OWNER_ARENA:
        pc_free(owner, pointer);
        pc__arena_release();
        break;
    }
}

/* A block keeps its kind, but for one of a closed arena: that is moved to where new ones go. */
static void *realloc_in(pc_arena *arena, void *pointer, size_t n_bytes)
{
    if (!pointer)
        return malloc_in(arena, n_bytes);
    pc_arena *owner;
    switch (pc__arena_hold(pointer, &owner)) {
    case PC__OWNER_REAL:
        return realloc(pointer, n_bytes);
    case PC__OWNER_LOST:
        break;
    case PC__OWNER_ARENA:;
        void *moved;
        if (pc__arena_is_open(owner)) {
            moved = pc_realloc(owner, pointer, n_bytes);
        } else {
            size_t old_bytes = pc_usable_size(owner, pointer);
            moved = malloc_in(arena, n_bytes);
            if (moved)
                memcpy(moved, pointer, n_bytes < old_bytes ? n_bytes : old_bytes);
        }
        pc__arena_release();
        return moved;
    }
    errno = ENOMEM; /* how much there was to copy is not known any more */
    return NULL;
}

/* ------------------------------------------------- the thread's current arena */

PC_API void *pc_current_malloc(size_t n_bytes)
{
    return malloc_in(current, n_bytes);
}

PC_API void *pc_current_calloc(size_t n_items, size_t item_bytes)
{
    return calloc_in(current, n_items, item_bytes);
}

PC_API void *pc_current_realloc(void *pointer, size_t n_bytes)
{
    return realloc_in(current, pointer, n_bytes);
}

PC_API void pc_current_free(void *pointer)
{
    free_anywhere(pointer);
}

PC_API void *pc_current_aligned_alloc(size_t alignment, size_t n_bytes)
{
    return takes(current) ? pc_aligned_alloc(current, alignment, n_bytes)
                          : aligned_alloc(alignment, n_bytes);
}

static void *hook_memalign(size_t alignment, size_t n_bytes)
{
    return takes(current) ? pc_aligned_alloc(current, alignment, n_bytes)
                          : memalign(alignment, n_bytes);
}

static int hook_posix_memalign(void **out, size_t alignment, size_t n_bytes)
{
    if (!takes(current))
        return posix_memalign(out, alignment, n_bytes);
    if (alignment < sizeof(void *) || alignment & (alignment - 1))
        return EINVAL;
    int saved = errno;
    void *block = pc_aligned_alloc(current, alignment, n_bytes);
    errno = saved;
    if (!block)
        return ENOMEM;
    *out = block;
    return 0;
}

static size_t hook_malloc_usable_size(void *pointer)
{
    pc_arena *owner;
    size_t n_bytes = 0;
    switch (pc__arena_hold(pointer, &owner)) {
    case PC__OWNER_REAL:
        return malloc_usable_size(pointer);
    case PC__OWNER_LOST:
        break;
    case PC__OWNER_ARENA:
        n_bytes = pc_usable_size(owner, pointer);
        pc__arena_release();
        break;
    }
    return n_bytes;
}

static void *hook_reallocarray(void *pointer, size_t n_items, size_t item_bytes)
{
    size_t n_bytes;
    if (__builtin_mul_overflow(n_items, item_bytes, &n_bytes)) {
        errno = ENOMEM;
        return NULL;
    }
    return realloc_in(current, pointer, n_bytes);
}

static char *hook_strndup(const char *text, size_t most)
{
    size_t length = strnlen(text, most);
    char *copy = malloc_in(current, length + 1);
    if (copy) {
        memcpy(copy, text, length);
        copy[length] = '\0';
    }
    return copy;
}

static char *hook_strdup(const char *text)
{
    return hook_strndup(text, strlen(text));
}

/* ------------------------------------------------------------------- NumPy */

/* PyDataMem_Handler of NumPy's C interface, version 1 (NumPy 1.22 and later). */
struct numpy_handler {
    char name[127];
    uint8_t version;
    struct {
        void *ctx;
        void *(*malloc)(void *ctx, size_t n_bytes);
        void *(*calloc)(void *ctx, size_t n_items, size_t item_bytes);
        void *(*realloc)(void *ctx, void *pointer, size_t n_bytes);
        void (*free)(void *ctx, void *pointer, size_t n_bytes);
    } allocator;
};

static void *numpy_malloc(void *arena, size_t n_bytes)
{
    return malloc_in(arena, n_bytes);
}

static void *numpy_calloc(void *arena, size_t n_items, size_t item_bytes)
{
    return calloc_in(arena, n_items, item_bytes);
}

static void *numpy_realloc(void *arena, void *pointer, size_t n_bytes)
{
    return realloc_in(arena, pointer, n_bytes);
}

static void numpy_free(void *arena, void *pointer, size_t n_bytes)
{
    (void)arena;
    (void)n_bytes;
    free_anywhere(pointer);
}

PC_API void *pc_numpy_handler_new(pc_arena *arena)
{
    struct numpy_handler *handler = calloc(1, sizeof *handler);
    if (!handler)
        return NULL;
    (void)snprintf(handler->name, sizeof handler->name, "clamor_region");
    handler->version = 1;
    handler->allocator.ctx = arena;
    handler->allocator.malloc = numpy_malloc;
    handler->allocator.calloc = numpy_calloc;
    handler->allocator.realloc = numpy_realloc;
    handler->allocator.free = numpy_free;
    return handler;
}

PC_API void pc_numpy_handler_free(void *handler)
{
    free(handler);
}

/* --------------------------------------------------- imports of a library */

#if defined(__x86_64__)
#define R_SLOT R_X86_64_JUMP_SLOT
#define R_GOT R_X86_64_GLOB_DAT
#define R_POINTER R_X86_64_64
#elif defined(__aarch64__)
#define R_SLOT R_AARCH64_JUMP_SLOT
#define R_GOT R_AARCH64_GLOB_DAT
#define R_POINTER R_AARCH64_ABS64
#endif

typedef void (*function)(void);

static const struct {
    const char *name;
    function hook;
} hooks[] = {
    {"malloc", (function)pc_current_malloc},
    {"calloc", (function)pc_current_calloc},
    {"realloc", (function)pc_current_realloc},
    {"free", (function)pc_current_free},
    {"cfree", (function)pc_current_free},
    {"aligned_alloc", (function)pc_current_aligned_alloc},
    {"memalign", (function)hook_memalign},
    {"posix_memalign", (function)hook_posix_memalign},
    {"malloc_usable_size", (function)hook_malloc_usable_size},
    {"reallocarray", (function)hook_reallocarray},
    {"strdup", (function)hook_strdup},
    {"__strdup", (function)hook_strdup},
    {"strndup", (function)hook_strndup},
    {"__strndup", (function)hook_strndup},
};
#define N_HOOKS (sizeof hooks / sizeof hooks[0])

struct object {
    const struct link_map *map;
    const ElfW(Sym) *symbols;
    const char *strings;
    size_t strings_bytes;
    const ElfW(Rela) *tables[2];
    size_t n_rela[2];
    uintptr_t relro_begin, relro_end; /* pages that are read-only by now */
};

static int find_relro(struct dl_phdr_info *info, size_t size, void *argument)
{
    (void)size;
    struct object *object = argument;
    if (info->dlpi_addr != object->map->l_addr ||
        strcmp(info->dlpi_name, object->map->l_name) != 0)
        return 0;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_GNU_RELRO) {
            uintptr_t begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
            object->relro_begin = begin & ~(page - 1);
            object->relro_end = (begin + info->dlpi_phdr[i].p_memsz) & ~(page - 1);
        }
    return 1;
}

static int read_dynamic(const struct link_map *map, struct object *out)
{
    *out = (struct object){.map = map};
    size_t rela_bytes = 0, slots_bytes = 0;
    for (const ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; entry++) {
        uintptr_t at = entry->d_un.d_ptr;
        if (at < map->l_addr)
            at += map->l_addr; /* a loader that leaves the section as it was */
        switch (entry->d_tag) {
        case DT_SYMTAB: out->symbols = (const void *)at; break;
        case DT_STRTAB: out->strings = (const void *)at; break;
        case DT_STRSZ: out->strings_bytes = entry->d_un.d_val; break;
        case DT_RELA: out->tables[0] = (const void *)at; break;
        case DT_RELASZ: rela_bytes = entry->d_un.d_val; break;
        case DT_JMPREL: out->tables[1] = (const void *)at; break;
        case DT_PLTRELSZ: slots_bytes = entry->d_un.d_val; break;
        default: break;
        }
    }
    if (!out->symbols || !out->strings)
        return pc__fail(PC_ERR_PROTOCOL, "%s has no dynamic symbols", map->l_name);
    out->n_rela[0] = out->tables[0] ? rela_bytes / sizeof(ElfW(Rela)) : 0;
    out->n_rela[1] = out->tables[1] ? slots_bytes / sizeof(ElfW(Rela)) : 0;
    (void)dl_iterate_phdr(find_relro, out);
    return PC_OK;
}

static const void *object_of(uintptr_t address)
{
    Dl_info info;
    return address && dladdr((const void *)address, &info) ? info.dli_fbase : NULL;
}

/* Whether a slot leads to the allocator that this library calls too, or to the loader's stub. */
static bool is_process_allocator(const struct object *object, const char *name, uintptr_t value)
{
    const void *where = object_of(value);
    static const char anchor;
    if (!where || where == object_of((uintptr_t)object->map->l_ld))
        return true; /* not bound yet */
    if (where == object_of((uintptr_t)&anchor) ||
        where == object_of((uintptr_t)dlsym(RTLD_DEFAULT, name)))
        return true;
    const void *program = dlsym(RTLD_DEFAULT, "_start"); /* its stubs stand for libc's addresses */
    return where == object_of((uintptr_t)dlsym(RTLD_DEFAULT, "malloc")) ||
           (program && where == object_of((uintptr_t)program));
}

static int store(const struct object *object, uintptr_t slot, function hook)
{
    uintptr_t page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    void *page = (void *)(slot & ~(page_bytes - 1));
    bool is_protected = slot >= object->relro_begin && slot < object->relro_end;
    if (is_protected && mprotect(page, page_bytes, PROT_READ | PROT_WRITE))
        return pc__fail_errno("mprotect of the imports of %s", object->map->l_name);
    __atomic_store_n((uintptr_t *)slot, (uintptr_t)hook, __ATOMIC_RELEASE);
    if (is_protected && mprotect(page, page_bytes, PROT_READ))
        return pc__fail_errno("mprotect of the imports of %s", object->map->l_name);
    return PC_OK;
}

/* 1: the slot leads here; 0: it is none of ours. */
static int patch_slot(const struct object *object, const ElfW(Rela) *rela)
{
    unsigned type = (unsigned)ELF64_R_TYPE(rela->r_info);
    if (type != R_SLOT && type != R_GOT && !(type == R_POINTER && rela->r_addend == 0))
        return 0;
    const ElfW(Sym) *symbol = &object->symbols[ELF64_R_SYM(rela->r_info)];
    if (symbol->st_name >= object->strings_bytes)
        return 0;
    const char *name = object->strings + symbol->st_name;
    for (size_t i = 0; i < N_HOOKS; i++) {
        if (strcmp(name, hooks[i].name) != 0)
            continue;
        uintptr_t slot = object->map->l_addr + rela->r_offset;
        uintptr_t value = __atomic_load_n((uintptr_t *)slot, __ATOMIC_ACQUIRE);
        if (value == (uintptr_t)hooks[i].hook)
            return 1;
        bool ours = symbol->st_shndx == SHN_UNDEF && is_process_allocator(object, name, value);
        if (!ours && type == R_POINTER)
            return 0; /* a variable, and somebody has set it */
        if (!ours)
            return pc__fail(PC_ERR_DENIED, "%s has another %s than this process",
                            object->map->l_name, name);
        int rc = store(object, slot, hooks[i].hook);
        return rc ? rc : 1;
    }
    return 0;
}

/* Libraries whose memory is Python's, or whose malloc is the one that all others get. */
static const char *refusal(const struct link_map *map)
{
    static const char anchor;
    const char *file = strrchr(map->l_name, '/');
    file = file ? file + 1 : map->l_name;
    if (!*file)
        return "it is the Python program itself";
    if (object_of((uintptr_t)map->l_ld) == object_of((uintptr_t)&anchor))
        return "it is clamor's own page cache";
    if (strncmp(file, "libpython", 9) == 0)
        return "it is Python itself: its objects must not lie in a region";
    if (strstr(map->l_name, "/numpy/") || strstr(map->l_name, "/numpy.libs/"))
        return "it is NumPy: use numpy_allocator() for arrays";
    if (strncmp(file, "libc.so", 7) == 0 || strncmp(file, "ld-linux", 8) == 0 ||
        strncmp(file, "libc-", 5) == 0 || strncmp(file, "linux-vdso", 10) == 0)
        return "it is the C library, whose memory is everybody's";
    return NULL;
}

static int patch_object(const struct link_map *map)
{
    const char *why = refusal(map);
    if (why)
        return pc__fail(PC_ERR_DENIED, "%s: %s", *map->l_name ? map->l_name : "the program", why);
    struct object object;
    int rc = read_dynamic(map, &object);
    int n_slots = 0;
    for (int table = 0; table < 2 && rc == PC_OK; table++)
        for (size_t i = 0; i < object.n_rela[table] && rc == PC_OK; i++) {
            int patched = patch_slot(&object, &object.tables[table][i]);
            if (patched < 0)
                rc = patched;
            else
                n_slots += patched;
        }
    return rc ? rc : n_slots;
}

static int patch_named(const char *name, char *path, size_t path_capacity)
{
    void *handle = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    struct link_map *map = NULL;
    if (!handle || dlinfo(handle, RTLD_DI_LINKMAP, &map)) {
        if (handle)
            (void)dlclose(handle);
        return pc__fail(PC_ERR_RANGE, "%s is not loaded in this process",
                        name && *name ? name : "the program");
    }
    if (path)
        (void)snprintf(path, path_capacity, "%s", map->l_name);
    int n_slots = patch_object(map);
    const char *strings = NULL;
    for (const ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; entry++)
        if (entry->d_tag == DT_STRTAB)
            strings = (const char *)(entry->d_un.d_ptr < map->l_addr
                                         ? entry->d_un.d_ptr + map->l_addr
                                         : entry->d_un.d_ptr);
    for (const ElfW(Dyn) *entry = map->l_ld;
         path && strings && n_slots >= 0 && entry->d_tag != DT_NULL; entry++) {
        const char *needed = strings + (entry->d_tag == DT_NEEDED ? entry->d_un.d_val : 0);
        if (entry->d_tag != DT_NEEDED || (strncmp(needed, "libstdc++.so", 12) != 0 &&
                                          strncmp(needed, "libc++", 6) != 0))
            continue; /* operator new is there: its malloc is what counts */
        int more = patch_named(needed, NULL, 0);
        n_slots = more < 0 ? more : n_slots + more;
    }
    (void)dlclose(handle);
    return n_slots;
}

PC_API int pc_shim_patch(const char *name, char *path, size_t path_capacity)
{
    if (!path || !path_capacity)
        return pc__fail(PC_ERR_RANGE, "no room for a path");
    path[0] = '\0';
    return patch_named(name, path, path_capacity);
}
