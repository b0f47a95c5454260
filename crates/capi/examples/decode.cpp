// One step of decoding on the host: from keys and values in pages, from dense rows, and from pages to which
// the call appends the newest key.
#include <flashcore.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr std::int64_t kBatch = 3, kHeads = 8, kHeadsKv = 2, kDim = 64, kPage = 16, kPages = 4;

flashcore_operand Operand(std::uint32_t operand, std::uint32_t dtype, const void *x,
                          std::vector<std::int64_t> shape) {
  flashcore_operand o{};
  o.operand = operand;
  o.dtype = dtype;
  o.address = reinterpret_cast<std::uintptr_t>(x);
  o.dimensions = shape.size();
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0; stride *= shape[i]) {
    o.shape[i] = shape[i];
    o.strides[i] = stride;
  }
  return o;
}

std::vector<float> Attention(const std::vector<float> &q, std::vector<flashcore_operand> operands) {
  std::vector<float> out(kBatch * kHeads * kDim);
  operands.push_back(Operand(FLASHCORE_Q, FLASHCORE_F32, q.data(), {kBatch, kHeads, 1, kDim}));
  operands.push_back(Operand(FLASHCORE_OUT, FLASHCORE_F32, out.data(), {kBatch, kHeads, 1, kDim}));
  std::array<char, 256> error{};
  flashcore_call call{};
  call.size = sizeof call;
  call.operands = operands.data();
  call.operand_count = operands.size();
  call.device_type = FLASHCORE_CPU;
  call.flags = FLASHCORE_CAUSAL;
  call.error = error.data();
  call.error_size = error.size();
  if (flashcore_attention(&call) != FLASHCORE_OK) {
    std::fprintf(stderr, "%s\n", error.data());
    std::exit(1);
  }
  return out;
}

}  // namespace

int main() {
  const std::array<std::int32_t, kBatch> lengths{50, 16, 1};
  // The pages of a sequence lie anywhere in the pool. Entries after its length are not read.
  const std::array<std::int32_t, kBatch * kPages> table{9, 2, 7, 0, 4, -1, -1, -1, 5, 99, 99, 99};
  const std::int64_t in_pool = 10, rows = kPages * kPage, row = kHeadsKv * kDim;
  std::vector<float> q(kBatch * kHeads * kDim), k(kBatch * rows * row), v(k.size());
  for (std::size_t i = 0; i < q.size(); i++) q[i] = float(i * 29 % 17) / 8 - 1;
  for (std::size_t i = 0; i < k.size(); i++) k[i] = float(i * 31 % 19) / 9 - 1, v[i] = float(i * 37 % 23) / 11 - 1;

  std::vector<float> k_pool(in_pool * kPage * row), v_pool(k_pool.size());
  for (std::int64_t b = 0; b < kBatch; b++)
    for (std::int64_t j = 0; j < lengths[b]; j++) {
      const std::int64_t from = (b * rows + j) * row;
      const std::int64_t to = (table[b * kPages + j / kPage] * kPage + j % kPage) * row;
      std::memcpy(&k_pool[to], &k[from], row * sizeof(float));
      std::memcpy(&v_pool[to], &v[from], row * sizeof(float));
    }
  // [batch or page, row, head, dim] in memory, as [batch or page, head, row, dim].
  const auto heads_first = [&](std::uint32_t operand, const std::vector<float> &x, std::int64_t entries,
                               std::int64_t of_entry) {
    auto o = Operand(operand, FLASHCORE_F32, x.data(), {entries, kHeadsKv, of_entry, kDim});
    o.strides[0] = of_entry * row, o.strides[1] = kDim, o.strides[2] = row;
    return o;
  };
  const auto used = Operand(FLASHCORE_SEQUSED_K, FLASHCORE_I32, lengths.data(), {kBatch});
  const auto pages = Operand(FLASHCORE_PAGE_TABLE, FLASHCORE_I32, table.data(), {kBatch, kPages});
  const auto dense = Attention(q, {heads_first(FLASHCORE_K, k, kBatch, rows),
                                   heads_first(FLASHCORE_V, v, kBatch, rows), used});
  const auto paged = Attention(q, {heads_first(FLASHCORE_K, k_pool, in_pool, kPage),
                                   heads_first(FLASHCORE_V, v_pool, in_pool, kPage), used, pages});
  // The last key of each sequence once more, appended by the call to pages that lack it.
  auto before = lengths;
  std::vector<float> k_new(kBatch * row), v_new(k_new.size());
  for (std::int64_t b = 0; b < kBatch; b++) {
    const std::int64_t j = --before[b], from = (b * rows + j) * row;
    const std::int64_t to = (table[b * kPages + j / kPage] * kPage + j % kPage) * row;
    std::memcpy(&k_new[b * row], &k[from], row * sizeof(float));
    std::memcpy(&v_new[b * row], &v[from], row * sizeof(float));
    std::fill_n(&k_pool[to], row, 0.0f), std::fill_n(&v_pool[to], row, 0.0f);
  }
  const auto appended = Attention(q, {heads_first(FLASHCORE_K, k_pool, in_pool, kPage),
                                      heads_first(FLASHCORE_V, v_pool, in_pool, kPage),
                                      Operand(FLASHCORE_SEQUSED_K, FLASHCORE_I32, before.data(), {kBatch}), pages,
                                      heads_first(FLASHCORE_K_NEW, k_new, kBatch, 1),
                                      heads_first(FLASHCORE_V_NEW, v_new, kBatch, 1)});
  const bool equal = dense == paged && dense == appended;
  std::printf("keys in pages, in dense rows and appended give %s results\n", equal ? "equal" : "different");
  return equal ? 0 : 1;
}
