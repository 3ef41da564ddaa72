// A compile that keeps a C++ compiler's allocator busy: many instantiations of standard templates.
#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

template <int N> struct Key {
  std::array<int, N + 1> parts{};
  bool operator<(const Key &other) const { return parts < other.parts; }
};

template <int N> struct Value {
  std::tuple<int, std::string, std::vector<Key<N>>> data;
  std::variant<int, double, std::string, Key<N>> choice;
};

template <int N> int work(const std::string &text) {
  std::map<Key<N>, Value<N>> ordered;
  std::unordered_map<std::string, std::unique_ptr<Value<N>>> hashed;
  std::vector<std::function<int(const Value<N> &)>> calls;
  for (int i = 0; i < N + 3; ++i) {
    Key<N> key;
    std::iota(key.parts.begin(), key.parts.end(), i);
    Value<N> value{{i, text, {key}}, {}};
    if (i % 2) value.choice = key; else value.choice = text;
    calls.push_back([i](const Value<N> &v) {
      return i + std::visit([](const auto &x) { return static_cast<int>(sizeof x); }, v.choice);
    });
    hashed[text + std::to_string(i)] = std::make_unique<Value<N>>(value);
    ordered.emplace(key, std::move(value));
  }
  int sum = 0;
  for (auto &[key, value] : ordered)
    for (auto &call : calls) sum += call(value) + key.parts[0];
  std::vector<std::pair<int, std::string>> sorted;
  for (auto &[name, value] : hashed) sorted.emplace_back(std::get<0>(value->data), name);
  std::stable_sort(sorted.begin(), sorted.end());
  return sum + static_cast<int>(sorted.size());
}

template <int... N> int all(const std::string &text, std::integer_sequence<int, N...>) {
  return (work<N>(text) + ...);
}

int main(int argc, char **argv) {
  return all(argc > 1 ? argv[1] : "abc", std::make_integer_sequence<int, 2>{});
}
