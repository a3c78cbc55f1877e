//! Compiles the kernels, where there is a compiler.
fn main() {
    kernel_build::compile("whole_step", &["cuda/whole_step.cu"]);
}
