// A library that knows nothing of regions: a map of strings and a search tree, made of pointers.
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <string>
#include <thread>
#include <vector>

struct Node {
    double key;
    Node *left, *right;
    char *label;
};

struct Dictionary {
    std::map<std::string, std::vector<int>> entries;
};

static void *(*const make_node)(size_t) = malloc; // an import that is data

extern "C" {

Node *build_tree(const double *keys, size_t n_keys)
{
    Node *root = nullptr;
    for (size_t i = 0; i < n_keys; i++) {
        Node **at = &root;
        while (*at)
            at = keys[i] < (*at)->key ? &(*at)->left : &(*at)->right;
        *at = static_cast<Node *>(make_node(sizeof(Node)));
        **at = {keys[i], nullptr, nullptr, strdup("a label")};
    }
    return root;
}

size_t count_below(const Node *node, double limit)
{
    if (!node)
        return 0;
    return count_below(node->left, limit) + (node->key < limit ? 1 : 0) +
           (node->key < limit ? count_below(node->right, limit) : 0);
}

void free_tree(Node *node)
{
    if (!node)
        return;
    free_tree(node->left);
    free_tree(node->right);
    free(node->label);
    free(node);
}

Dictionary *build_dictionary(int n)
{
    auto *made = new Dictionary;
    for (int i = 0; i < n; i++) {
        auto &entry = made->entries["a key that is too long for the short form: " + std::to_string(i)];
        for (int j = 0; j < i % 10; j++)
            entry.push_back(i * j);
    }
    return made;
}

long sum_of(const Dictionary *dictionary, int i)
{
    auto found = dictionary->entries.find("a key that is too long for the short form: " +
                                          std::to_string(i));
    long sum = 0;
    if (found != dictionary->entries.end())
        for (int value : found->second)
            sum += value;
    return sum;
}

void *allocate(size_t n_bytes) { return malloc(n_bytes); }
void *reallocate(void *block, size_t n_bytes) { return realloc(block, n_bytes); }
void release(void *block) { free(block); }
void *allocate_aligned(size_t alignment, size_t n_bytes)
{
    void *block = nullptr;
    return posix_memalign(&block, alignment, n_bytes) ? nullptr : block;
}
void *new_or_null(size_t n_bytes)
{
    try {
        return ::operator new(n_bytes);
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}
void *allocate_on_a_thread(size_t n_bytes)
{
    void *block = nullptr;
    std::thread([&] { block = malloc(n_bytes); }).join();
    return block;
}
}
