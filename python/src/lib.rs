//! `flashcore_attn._flashcore`: the Rust part of the Python package. The package reads addresses, shapes and
//! strides from the caller's tensors and passes them here. Eager calls on PyTorch's tensors are read here, by
//! functions that PyTorch hands over. So this crate neither links nor imports NumPy or PyTorch.
//!
//! The functions are private to the package. Other Python code calls `flashcore_attn`, which checks that an
//! address belongs to a live tensor.

mod cache;
mod call;
mod device;
mod eager;
mod error;
#[cfg(feature = "evolve")]
mod evolve;
mod gradients;
mod host;
mod interrupt;
mod merge;
mod openmp;
mod quantize;
mod tensor;
mod torch;

// The functions that XLA and TVM-FFI look up in this library.
use flashcore_c as _;
use pyo3::prelude::*;

#[pymodule]
fn _flashcore(module: &Bound<'_, PyModule>) -> PyResult<()> {
    // The process id is recorded at import, so that children made by `fork` later see that they have a
    // parent.
    openmp::is_forked();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(call::attend, module)?)?;
    module.add_function(wrap_pyfunction!(cache::write_slots, module)?)?;
    module.add_function(wrap_pyfunction!(host::describe_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(merge::merge_states, module)?)?;
    module.add_function(wrap_pyfunction!(quantize::quantize_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(quantize::quantize_gpu, module)?)?;
    module.add_function(wrap_pyfunction!(device::explain, module)?)?;
    module.add_function(wrap_pyfunction!(device::describe_gpus, module)?)?;
    module.add_function(wrap_pyfunction!(device::lacks_gradients, module)?)?;
    module.add_function(wrap_pyfunction!(device::check_gpu, module)?)?;
    module.add_function(wrap_pyfunction!(device::cache_folder, module)?)?;
    module.add_class::<eager::Eager>()?;
    module.add("HAS_SEARCH", cfg!(feature = "evolve"))?;
    #[cfg(feature = "evolve")]
    evolve::register(module)?;
    Ok(())
}
