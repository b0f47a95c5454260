//! The arguments of Triton's compiler that come from a launch file, and its results.

use problem::DType;
use ptx::Arg;

use super::memory::BufferType;
use super::scalar::{Scalar, ScalarType};
use super::{ArgSpec, LaunchError, LaunchSpec};

/// Triton gives a buffer's address this hint when it launches a kernel, because allocations have this
/// alignment.
const ALIGNED: &str = ":16";

impl LaunchSpec {
    /// The types of the first launch's arguments as Triton names them. As in a launch by Triton, buffers and
    /// numbers that are multiples of 16 are marked.
    ///
    /// # Errors
    /// For an argument that a Triton kernel cannot have.
    pub fn triton_types(&self) -> Result<Vec<String>, LaunchError> {
        self.launches[0].args.iter().map(|&at| self.triton_type(at)).collect()
    }

    /// The constants with which Triton compiles the kernel: `stated` ones, which count first, and those of
    /// the first launch.
    pub fn triton_constants(&self, stated: &[(String, String)]) -> Vec<(String, String)> {
        let own = self.launches[0].constexpr.iter();
        let own = own.filter(|(name, _)| stated.iter().all(|(other, _)| other != name));
        stated.iter().chain(own).cloned().collect()
    }

    /// Refuses constants of a kernel in this language, which is not Triton.
    ///
    /// # Errors
    /// The first constant.
    pub fn without_constants(&self, language: &str) -> Result<(), LaunchError> {
        let mut constants = self.launches.iter().flat_map(|step| &step.constexpr);
        constants.next().map_or(Ok(()), |(name, _)| {
            let accepted = format!("none: the kernel is {language}, and only a Triton kernel has constants");
            Err(LaunchError::value("launch.constexpr", name, accepted))
        })
    }

    fn triton_type(&self, at: usize) -> Result<String, LaunchError> {
        let refuse = |given: &str| {
            LaunchError::value(
                format!("[[arg]] {at} role"),
                given,
                "a buffer or a number that Triton has a type for",
            )
        };
        match &self.args[at] {
            ArgSpec::Buffer(memory) => {
                element(memory.dtype).map(|name| format!("*{name}{ALIGNED}")).ok_or_else(|| refuse("buffer"))
            }
            ArgSpec::Tensor(tensor) => {
                let dtype = self.problem.as_ref().map(|problem| problem.dtypes.of(*tensor));
                let name = match dtype {
                    Some(DType::E4m3) => "fp8e4nv",
                    Some(DType::E5m2) => "fp8e5",
                    Some(DType::F16) => "fp16",
                    Some(DType::Bf16) => "bf16",
                    Some(DType::F32) | None => "fp32",
                };
                Ok(format!("*{name}{ALIGNED}"))
            }
            ArgSpec::Lse => Ok(format!("*fp32{ALIGNED}")),
            ArgSpec::Pointers(_) => Ok(format!("*i64{ALIGNED}")),
            ArgSpec::Scalar(scalar) => number(scalar).ok_or_else(|| refuse(scalar.ty.name())),
            other => Err(refuse(other.role())),
        }
    }

    /// Adds the properties that Triton's compiler determines to the first launch: the dynamic shared memory,
    /// and null pointers for the scratch buffers that follow the kernel's own parameters.
    pub fn complete_triton(&mut self, shared: u32, parameters: usize) {
        for step in &mut self.launches {
            if step.dynamic_shared == 0 {
                step.dynamic_shared = shared;
            }
            while step.args.len() < parameters {
                step.args.push(self.args.len());
                self.args.push(ArgSpec::Scalar(Scalar { ty: ScalarType::U64, value: Arg::U64(0) }));
                self.names.push(None);
            }
        }
    }
}

fn element(dtype: BufferType) -> Option<&'static str> {
    Some(match dtype.name() {
        "f16" => "fp16",
        "bf16" => "bf16",
        "f32" => "fp32",
        "f64" => "fp64",
        "i8" => "i8",
        "u8" => "u8",
        "i16" => "i16",
        "u16" => "u16",
        "i32" => "i32",
        "u32" => "u32",
        "i64" => "i64",
        "u64" => "u64",
        "e4m3" => "fp8e4nv",
        "e5m2" => "fp8e5",
        _ => return None,
    })
}

fn number(scalar: &Scalar) -> Option<String> {
    let name = match scalar.ty {
        ScalarType::Bool => "i1",
        ScalarType::U8 => "u8",
        ScalarType::I8 => "i8",
        ScalarType::U16 => "u16",
        ScalarType::I16 => "i16",
        ScalarType::U32 => "u32",
        ScalarType::I32 => "i32",
        ScalarType::U64 => "u64",
        ScalarType::I64 => "i64",
        ScalarType::F32 => "fp32",
        ScalarType::F64 => "fp64",
        _ => return None,
    };
    let value = scalar.number();
    let hint = !scalar.ty.is_float() && scalar.ty != ScalarType::Bool && value % 16.0 == 0.0;
    Some(format!("{name}{}", if hint { ALIGNED } else { "" }))
}
