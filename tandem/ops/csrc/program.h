// A captured step: a list of operator calls with all their arguments, replayed in one call.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/custom_class.h>

#include <string>
#include <utility>
#include <vector>

namespace tandem {

struct Program : torch::CustomClassHolder {
  struct Call {
    c10::OperatorHandle op;
    std::vector<c10::IValue> arguments;
  };

  /// Appends a call; `arguments` are all of the schema's, in its order, outputs included.
  void add(const std::string& name, const std::string& overload,
           const c10::List<c10::IValue>& arguments) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    TORCH_CHECK(arguments.size() == op.schema().arguments().size(), name, ": expected ",
                op.schema().arguments().size(), " arguments, got ", arguments.size());
    std::vector<c10::IValue> values;
    values.reserve(arguments.size());
    for (size_t i = 0; i < arguments.size(); ++i) values.push_back(arguments.get(i));
    calls_.push_back(Call{op, std::move(values)});
  }

  void run() {
    c10::InferenceMode guard;
    torch::jit::Stack stack;
    stack.reserve(32);
    for (const Call& call : calls_) {
      stack.assign(call.arguments.begin(), call.arguments.end());
      call.op.callBoxed(stack);
    }
  }

  int64_t size() { return static_cast<int64_t>(calls_.size()); }

 private:
  std::vector<Call> calls_;
};

}  // namespace tandem
