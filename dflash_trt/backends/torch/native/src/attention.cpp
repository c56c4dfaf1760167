/// Attention over the pages of each request. Scores, their softmax and the weighted values of a row are sums in the order
/// of the positions, in vectors that start at multiples of kPanel: they depend on the row and on its keys alone.
#include "product.h"
#include "rows.h"
#include "transpose.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

namespace dflash_trt
{
namespace
{

constexpr int64_t kPositionsAhead = 4 * kPanel; // whose keys and values are loaded before they are scored
constexpr int64_t kMaxBytesAhead = 1 << 18;     // of all heads: a part of the second cache
constexpr int64_t kQueriesAtOnce = 24; // query vectors, rows times heads of a K/V head, that share a tile of keys

int64_t padded(int64_t length)
{
    return (length + kPanel - 1) / kPanel * kPanel;
}

/// Keys [start, stop): positions in the pages, or the request's own rows.
struct Range
{
    int64_t start, stop;
};

/// What one row sees: stored keys, and behind them rows of its own request.
struct Visible
{
    Range stored, own;
};

/// Rows [start, stop) of one request.
struct Request
{
    DflashTrtTokenRows const& rows;
    int64_t index, start, stop;

    Request(DflashTrtTokenRows const& all, int64_t request)
        : rows(all)
        , index(request)
    {
        int64_t const width = all.num_rows / all.num_requests;
        start = all.token_offsets == nullptr ? request * width : all.token_offsets[request];
        stop = all.token_offsets == nullptr ? start + width : all.token_offsets[request + 1];
    }

    int64_t page_of(int64_t position) const
    {
        return rows.page_table[index * rows.page_table_stride + position / rows.page_size];
    }

    Visible visible(DflashTrtAttention const& attention, int64_t row) const
    {
        int64_t const position = rows.positions[row], context = rows.context_lens[index], window = attention.window;
        int64_t const first = attention.chunk != 0 ? position - position % attention.chunk
            : window == 0                          ? 0
            : attention.is_window_anchored         ? context - window
                                                   : position - window + 1;
        if (rows.keeps_kv)
        {
            return {{first > 0 ? first : 0, position + 1}, {start, start}};
        }
        // The slots of a block stand at consecutive positions from the context's end on.
        int64_t own_start = start, own_stop = attention.is_causal ? row + 1 : stop;
        if (window != 0 && !attention.is_window_anchored)
        {
            own_start = row - window + 1 > start ? row - window + 1 : start;
            own_stop = row + window < own_stop ? row + window : own_stop;
        }
        int64_t const stored_start = std::max<int64_t>(first, attention.first_key);
        return {{stored_start < context ? stored_start : context, context}, {own_start, own_stop}};
    }
};

/// K or V of one head: of a stored position, or of a row of the call.
template <typename Element>
struct Keys
{
    Request const& request;
    Element const* stored; // of page 0, position 0
    int64_t page_stride, position_stride;
    float const* own; // of row 0
    int64_t own_stride;

    Keys(Request const& of, DflashTrtAttention const& attention, float const* rows, int64_t row_stride, int64_t kv_head,
        int64_t half) // of a page: 0 K, 1 V
        : request(of)
        , position_stride(attention.num_kv_heads * attention.head_dim)
        , own(rows + kv_head * attention.head_dim)
        , own_stride(row_stride)
    {
        int64_t const size = of.rows.page_size * position_stride;
        page_stride = 2 * size;
        stored = static_cast<Element const*>(attention.pages) + half * size + kv_head * attention.head_dim;
    }

    Element const* at(int64_t position) const
    {
        return stored + request.page_of(position) * page_stride + position % request.rows.page_size * position_stride;
    }

    /// Calls `visit(position, at(position), number of positions)` for each part of the range that lies on one page.
    template <typename Visit>
    void each_page(Range range, Visit const& visit) const
    {
        int64_t const page_size = request.rows.page_size;
        while (range.start < range.stop)
        {
            int64_t const stop = std::min(range.stop, (range.start / page_size + 1) * page_size);
            visit(range.start, at(range.start), stop - range.start);
            range.start = stop;
        }
    }

    /// Loads `size` elements of each position. Prefetches of the same lines gained nothing in a virtual machine.
    void load(Range const& range, int64_t size) const
    {
        each_page(range, [&](int64_t, Element const* row, int64_t count) {
            for (int64_t i = 0; i < count; ++i, row += position_stride)
            {
                for (int64_t line = 0; line < size; line += 64 / static_cast<int64_t>(sizeof(Element)))
                {
                    asm volatile("" : : "r"(*reinterpret_cast<char const*>(row + line)));
                }
            }
        });
    }
};

struct Scratch
{
    std::vector<float> queries, scores, keys, attended;
};

/// Some rows of a request and the query heads of one K/V head, over pages of these elements.
template <typename Element>
class Task
{
public:
    Task(DflashTrtAttention const& attention, Request const& request, Range rows, int64_t kv_head, Scratch& scratch)
        : attention_(attention)
        , request_(request)
        , rows_(rows)
        , kv_head_(kv_head)
        , heads_(attention.num_heads / attention.num_kv_heads)
        , scratch_(scratch)
        , keys_(request, attention, attention.k, attention.k_stride, kv_head, 0)
        , values_(request, attention, attention.v, attention.v_stride, kv_head, 1)
    {
        for (int64_t row = rows.start; row < rows.stop; ++row)
        {
            Visible const visible = request.visible(attention, row);
            widen(stored_, visible.stored);
            widen(own_, visible.own);
        }
        own_ = own_.start < own_.stop ? own_ : Range{request.start, request.start};
        stored_ = stored_.start < stored_.stop ? stored_ : Range{0, 0};
        first_ = stored_.start / kPanel * kPanel;
        own_offset_ = padded(stored_.stop) - first_;
        num_scores_ = own_offset_ + padded(own_.stop - request.start);
    }

    void run()
    {
        gather_queries();
        scratch_.scores.resize(num_queries() * num_scores_);
        scratch_.keys.resize(kPanel * attention_.head_dim);
        load_ahead({stored_.start, first_ + kPositionsAhead});
        for (int64_t position = first_; position < stored_.stop; position += kPanel)
        {
            load_ahead({position + kPositionsAhead, position + kPositionsAhead + kPanel});
            score(position - first_, position, stored_, [&](int64_t key) { return keys_.at(key); });
        }
        for (int64_t row = request_.start; row < own_.stop; row += kPanel)
        {
            score(own_offset_ + row - request_.start, row, own_,
                [&](int64_t key) { return keys_.own + key * keys_.own_stride; });
        }
        scratch_.attended.assign(num_queries() * attention_.head_dim, 0.0F);
        std::vector<float> const sums = softmax();
        weigh();
        write(sums);
    }

private:
    static void widen(Range& range, Range const& by)
    {
        if (by.start < by.stop)
        {
            range.start = by.start < range.start ? by.start : range.start;
            range.stop = by.stop > range.stop ? by.stop : range.stop;
        }
    }

    int64_t num_queries() const
    {
        return (rows_.stop - rows_.start) * heads_;
    }

    /// Rows of the head's query heads, (row, head), scaled.
    void gather_queries()
    {
        int64_t const width = heads_ * attention_.head_dim;
        float const scale = attention_.softcap == 0.0F ? attention_.scale : attention_.scale / attention_.softcap;
        scratch_.queries.resize(num_queries() * attention_.head_dim);
        float* to = scratch_.queries.data();
        for (int64_t row = rows_.start; row < rows_.stop; ++row, to += width)
        {
            float const* const from = attention_.q + row * attention_.q_stride + kv_head_ * width;
            for (int64_t i = 0; i < width; i += kLanes)
            {
                store(to + i, load(from + i) * broadcast(scale));
            }
        }
    }

    /// The keys and values of this head; or of all heads, which lie beside one another, with those of the first one. They
    /// stay in a cache for later rows of the request.
    void load_ahead(Range range) const
    {
        int64_t const row_bytes = keys_.position_stride * static_cast<int64_t>(sizeof(Element));
        bool const loads_all = attention_.num_threads == 1 && 2 * kPositionsAhead * row_bytes <= kMaxBytesAhead;
        if (rows_.start != request_.start || (loads_all && kv_head_ != 0))
        {
            return;
        }
        range.stop = std::min(range.stop, stored_.stop);
        int64_t const size = loads_all ? keys_.position_stride : attention_.head_dim;
        keys_.load(range, size);
        values_.load(range, size);
    }

    /// One panel of scores: of keys first .. first + kPanel - 1, those outside of the range being zeros.
    template <typename At>
    void score(int64_t column, int64_t first, Range const& range, At const& at)
    {
        using Key = std::decay_t<decltype(*at(first))>;
        alignas(64) static Key const zeros[1024] = {};
        Key const* keys[kPanel];
        for (int64_t key = 0; key < kPanel; ++key)
        {
            bool const is_inside = first + key >= range.start && first + key < range.stop;
            keys[key] = is_inside ? at(first + key) : zeros;
        }
        transpose(keys, attention_.head_dim, kPanel, scratch_.keys.data());
        multiply(Rows{scratch_.queries.data(), attention_.head_dim, num_queries()},
            Panels<float>{scratch_.keys.data(), kPanel, 0}, 1, attention_.head_dim,
            Sums{scratch_.scores.data() + column, num_scores_, nullptr, 0});
    }

    std::vector<float> softmax()
    {
        std::vector<float> sums(num_queries());
        for (int64_t query = 0; query < num_queries(); ++query)
        {
            Visible const visible = request_.visible(attention_, rows_.start + query / heads_);
            float* const scores = scratch_.scores.data() + query * num_scores_;
            cap(scores);
            hide_outside(scores, own_offset_, visible.stored, first_);
            hide_outside(scores + own_offset_, num_scores_ - own_offset_, visible.own, request_.start);
            sums[query] = exponentials(scores, attention_.sinks == nullptr
                    ? nullptr
                    : attention_.sinks + kv_head_ * heads_ + query % heads_);
        }
        return sums;
    }

    void cap(float* scores) const
    {
        for (int64_t i = 0; attention_.softcap != 0.0F && i < num_scores_; ++i)
        {
            scores[i] = attention_.softcap * std::tanh(scores[i]);
        }
    }

    /// Scores of keys from `first` on: those outside of the range have no weight.
    static void hide_outside(float* scores, int64_t count, Range const& range, int64_t first)
    {
        bool const is_empty = range.start >= range.stop;
        int64_t const start = is_empty ? count : range.start - first, stop = is_empty ? count : range.stop - first;
        std::fill(scores, scores + start, -INFINITY);
        std::fill(scores + stop, scores + count, -INFINITY);
    }

    /// Scores to exp(score - largest). Returns their sum, the sink's included.
    float exponentials(float* scores, float const* sink) const
    {
        Vec top = broadcast(-INFINITY);
        for (int64_t i = 0; i < num_scores_; i += kLanes)
        {
            top = max(top, load(scores + i));
        }
        float most = largest(top);
        most = sink != nullptr && *sink > most ? *sink : most;
        Vec total = broadcast(0.0F);
        for (int64_t i = 0; i < num_scores_; i += kLanes)
        {
            Vec const weight = exp(load(scores + i) - broadcast(most));
            store(scores + i, weight);
            total = total + weight;
        }
        return sum(total) + (sink == nullptr ? 0.0F : std::exp(*sink - most));
    }

    /// Adds up the values of all keys, in their order.
    void weigh()
    {
        values_.each_page(stored_, [&](int64_t position, Element const* head, int64_t count) {
            add_values(position - first_, head, values_.position_stride, count);
        });
        if (own_.start < own_.stop)
        {
            add_values(own_offset_ + own_.start - request_.start, values_.own + own_.start * values_.own_stride,
                values_.own_stride, own_.stop - own_.start);
        }
    }

    template <typename Value>
    void add_values(int64_t column, Value const* values, int64_t stride, int64_t count)
    {
        multiply(Rows{scratch_.scores.data() + column, num_scores_, num_queries()},
            Panels<Value>{values, stride, kPanel}, attention_.head_dim / kPanel, count,
            Sums{scratch_.attended.data(), attention_.head_dim, scratch_.attended.data(), attention_.head_dim});
    }

    void write(std::vector<float> const& sums) const
    {
        int64_t const head_dim = attention_.head_dim;
        for (int64_t query = 0; query < num_queries(); ++query)
        {
            int64_t const row = rows_.start + query / heads_, head = kv_head_ * heads_ + query % heads_;
            float const* const from = scratch_.attended.data() + query * head_dim;
            float* const to = attention_.out + (row * attention_.num_heads + head) * head_dim;
            Vec const factor = broadcast(1.0F / sums[query]);
            for (int64_t i = 0; i < head_dim; i += kLanes)
            {
                store(to + i, load(from + i) * factor);
            }
        }
    }

    DflashTrtAttention const& attention_;
    Request const& request_;
    Range rows_;
    int64_t kv_head_, heads_;
    Scratch& scratch_;
    Keys<Element> keys_, values_;
    Range stored_{INT64_MAX, 0}, own_{INT64_MAX, 0}; // that any of the rows sees
    int64_t first_;             // position of the first score, a multiple of kPanel
    int64_t own_offset_;        // of the scores of the request's own rows
    int64_t num_scores_;        // of a query, with padding
};

void write(float const* from, int64_t size, float* to)
{
    std::memcpy(to, from, size * sizeof(float));
}

void write(float const* from, int64_t size, BFloat16* to)
{
    std::transform(from, from + size, to, rounded_to_bfloat16);
}

/// K and V of one row into the page of its position.
template <typename Element>
void write_row(Request const& request, int64_t row, Element* pages, float const* k, float const* v, int64_t size)
{
    int64_t const page_size = request.rows.page_size, position = request.rows.positions[row];
    Element* const to = pages + (request.page_of(position) * 2 * page_size + position % page_size) * size;
    write(k, size, to);
    write(v, size, to + page_size * size);
}

template <typename Element>
void write_rows(DflashTrtTokenRows const& rows, DflashTrtAttention const& attention)
{
    for (int64_t index = 0; index < rows.num_requests; ++index)
    {
        Request const request(rows, index);
        for (int64_t row = request.start; row < request.stop; ++row)
        {
            write_row(request, row, static_cast<Element*>(attention.pages), attention.k + row * attention.k_stride,
                attention.v + row * attention.v_stride, attention.num_kv_heads * attention.head_dim);
        }
    }
}

struct Share
{
    int64_t request;
    Range rows;
    int64_t kv_head;
};

std::vector<Share> shares_of(DflashTrtTokenRows const& rows, DflashTrtAttention const& attention)
{
    int64_t const heads = attention.num_heads / attention.num_kv_heads;
    int64_t const at_once = heads < kQueriesAtOnce ? kQueriesAtOnce / heads : 1;
    std::vector<Share> shares;
    for (int64_t index = 0; index < rows.num_requests; ++index)
    {
        Request const request(rows, index);
        for (int64_t row = request.start; row < request.stop; row += at_once)
        {
            int64_t const stop = row + at_once < request.stop ? row + at_once : request.stop;
            for (int64_t head = 0; head < attention.num_kv_heads; ++head)
            {
                shares.push_back({index, {row, stop}, head});
            }
        }
    }
    return shares;
}

template <typename Element>
void attend(DflashTrtAttention const& attention)
{
    DflashTrtTokenRows const& rows = *attention.rows;
    if (rows.keeps_kv)
    {
        write_rows<Element>(rows, attention);
    }
    std::vector<Share> const shares = shares_of(rows, attention);
    int64_t const num_shares = shares.size();
#pragma omp parallel for num_threads(attention.num_threads) schedule(dynamic) if (attention.num_threads > 1 && num_shares > 4)
    for (int64_t index = 0; index < num_shares; ++index)
    {
        thread_local Scratch scratch;
        Request const request(rows, shares[index].request);
        Task<Element>(attention, request, shares[index].rows, shares[index].kv_head, scratch).run();
    }
}

template <typename Element>
void store_kv(DflashTrtStoreKv const& a)
{
    DflashTrtTokenRows const& rows = *a.rows;
    int64_t const size = a.num_kv_heads * a.head_dim;
    std::vector<float> rotated(size);
    for (int64_t index = 0; index < rows.num_requests; ++index)
    {
        Request const request(rows, index);
        for (int64_t row = request.start; row < request.stop && rows.positions[row] < a.limits[index]; ++row)
        {
            float const* const k = a.kv + row * a.kv_stride;
            rotate_row(a.rotation, row, k, a.num_kv_heads, a.head_dim, rotated.data());
            write_row(request, row, static_cast<Element*>(a.pages), rotated.data(), k + size, size);
        }
    }
}

} // namespace
} // namespace dflash_trt

using namespace dflash_trt;

void dflash_trt_cpu_attend(DflashTrtAttention const* attention)
{
    attention->rounds_kv ? attend<BFloat16>(*attention) : attend<float>(*attention);
}

void dflash_trt_cpu_store_kv(DflashTrtStoreKv const* arguments)
{
    arguments->rounds_kv ? store_kv<BFloat16>(*arguments) : store_kv<float>(*arguments);
}
