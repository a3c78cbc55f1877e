// Attention over a paged store, of any number of rows.
#pragma once

#include "attention.cuh"
#include "attention_band.cuh"
#include "attention_prompt.cuh"

namespace attention {
namespace {

// Loads every kernel, so that no later call does.
template <typename Element>
cudaError_t load_attend() {
    const cudaError_t error = band::load<Element>();
    return error == cudaSuccess ? load_prompt<Element>() : error;
}

// Queues answering queries: row-invariantly up to MAX_QUERY_ROWS, as a prompt's past those. `scratch` is aligned to 16 bytes.
template <typename Element>
cudaError_t attend(const Pages<Element> &pages, const Queries &queries, void *scratch, bool overlap, cudaStream_t stream) {
    if (queries.rows > MAX_QUERY_ROWS) return prompt(pages, queries, overlap, stream);
    return band::launch(pages, queries, scratch, overlap, stream);
}

}  // namespace
}  // namespace attention
