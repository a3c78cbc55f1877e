//! Compiles the kernels, where there is a compiler.
fn main() {
    kernel_build::compile(
        "qwen3_5",
        &["cuda/bf16_kv.cu", "cuda/bf16_linear.cu", "cuda/experts.cu", "cuda/gated_delta.cu", "cuda/rows.cu"],
    );
}
