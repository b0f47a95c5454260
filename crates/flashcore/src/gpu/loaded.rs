//! Kernels loaded on the device. No kernel is ever unloaded: a captured graph may refer to it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use driver::{Context, DriverError, Expect, Function};
use kernels::cache::CacheCode;
use kernels::merge::MergeCode;
use kernels::quantize::QuantizationCode;
use kernels::{Baked, KernelError, Plan, Program};

use super::scratch::Scratch;
use crate::AttentionError;

/// The key of loading and admission: what the code depends on, and which resources the kernels
/// may use. Problems that differ in other values have the same key and launch the same kernels.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub code: Code,
    /// One for each kernel, in launch order.
    pub expect: Vec<Expect>,
}

/// The properties on which the code of kernels depends.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Code {
    Attention(Box<(Baked, Plan)>),
    Quantization(QuantizationCode),
    Cache(CacheCode),
    Merge(MergeCode),
}

/// The loaded kernels of a program, which passed admission, in launch order.
pub(super) type Functions = Arc<[Function]>;

/// The loaded kernels of a device, and the kernels whose loading failed for good.
#[derive(Debug, Default)]
pub(super) struct Kernels {
    all: Mutex<HashMap<Key, Result<Functions, DriverError>>>,
    pub scratch: Scratch,
}

impl Kernels {
    /// The loaded kernels. The first call for a key emits the program and loads it.
    pub(super) fn load(
        &self,
        context: &Arc<Context>,
        key: Key,
        emit: impl FnOnce() -> Result<Program, KernelError>,
    ) -> Result<Functions, AttentionError> {
        let known = self.all.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        if let Some(known) = known {
            return Ok(known?);
        }
        let kernels = emit()?.kernels();
        let made = Function::load_all(context, kernels.iter().zip(&key.expect)).map(Functions::from);
        if made.as_ref().is_err_and(may_pass) {
            return Ok(made?);
        }
        // Two threads may load the same kernels at once; the first result stays.
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(all.entry(key).or_insert(made).clone()?)
    }
}

/// Whether loading the same kernel again may succeed.
fn may_pass(error: &DriverError) -> bool {
    !matches!(error, DriverError::Admission { .. } | DriverError::Compile { .. })
}
