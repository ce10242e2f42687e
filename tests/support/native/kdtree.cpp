// nanoflann's KD-tree over points that somebody else holds, and queries of it.
#include <nanoflann.hpp>

#include <cstddef>

struct Points {
    const double *coordinates;
    size_t n_points;
    size_t kdtree_get_point_count() const { return n_points; }
    double kdtree_get_pt(size_t i, size_t dim) const { return coordinates[3 * i + dim]; }
    template <class Box> bool kdtree_get_bbox(Box &) const { return false; }
};

using Tree = nanoflann::KDTreeSingleIndexAdaptor<nanoflann::L2_Simple_Adaptor<double, Points, double, size_t>,
                                                 Points, 3, size_t>;

struct Index {
    Points points;
    Tree tree;
    Index(const double *coordinates, size_t n_points)
        : points{coordinates, n_points},
          tree(3, points, nanoflann::KDTreeSingleIndexAdaptorParams(10))
    {
        tree.buildIndex();
    }
};

extern "C" {
Index *build_index(const double *coordinates, size_t n_points)
{
    return new Index(coordinates, n_points);
}
size_t nearest(const Index *index, const double *query, size_t k, size_t *out)
{
    double distances[64];
    return index->tree.knnSearch(query, k < 64 ? k : 64, out, distances);
}
}
