//! Builds kernels from Rust: registers typed by width, one method per instruction, structured control flow.
//!
//! A method that computes returns a fresh register. Its twin with the suffix `_to` writes an existing
//! register, for accumulators and loop variables. Where PTX distinguishes signed from unsigned, the method's
//! name does too (`shr_u`, `shr_s`). Sources are registers or immediates; immediates of the wrong width do
//! not compile:
//!
//! ```
//! # use flashcore_ptx as ptx;
//! use ptx::{Builder, CmpOp, Pointer, SpecialReg, Target};
//!
//! // y[i] = a · x[i] for i < n, one element per thread.
//! let mut k = Builder::kernel("scale");
//! let (x, y) = (k.param_pointer("x"), k.param_pointer("y"));
//! let (a, n) = (k.param_f32("a"), k.param_u32("n"));
//! let (block, threads, lane) =
//!     (k.special(SpecialReg::CtaidX), k.special(SpecialReg::NtidX), k.special(SpecialReg::TidX));
//! let i = k.mad(block, threads, lane);
//! let inside = k.setp_u(CmpOp::Lt, i, n);
//! k.if_(inside, |k| {
//!     let (from, to) = (k.index(x, i, 4), k.index(y, i, 4));
//!     let value = k.ld::<ptx::F32>(from);
//!     let scaled = k.mul(value, a);
//!     k.st(to, scaled);
//! });
//! let module = k.into_module(Target::sm(80));
//! assert_eq!((module.version.major, module.version.minor), (7, 0));
//! assert!(module.function("scale").is_some());
//! ```

mod arith;
mod bulk;
mod cluster;
mod control;
mod mbarrier;
mod memory;
mod registers;
mod tensor;
#[cfg(test)]
mod tests;
mod value;
mod warp;
mod wgmma;

pub use arith::Number;
pub use bulk::BulkOptions;
pub use tensor::Half;
pub use value::{
    ClusterShared, F32, F64, Float, Global, Int, Local, Pointer, Pred, R16, R32, R64, Shared, SharedPointer,
    Src, TensorMapPtr, Value,
};
pub use warp::Word;
pub use wgmma::Major;

use smallvec::SmallVec;

use crate::module::ParamSpace;
use crate::{
    Base, Body, Function, FunctionKind, Guard, Instruction, Item, Label, LaunchBounds, Linkage, Module, Op,
    Operand, Param, Reg, Register, Space, SpecialReg, Statement, Target, TensorMapSpec, Type, Variable,
    Verified, Version, Violations,
};

/// A kernel under construction.
#[derive(Clone, Debug)]
pub struct Builder {
    name: String,
    params: Vec<Param>,
    bounds: LaunchBounds,
    body: Body,
    /// Module-scope variables; only dynamic shared memory.
    globals: Vec<Variable>,
    /// The guard of the instructions that are being emitted.
    guard: Option<Guard>,
    /// The number of registers per class so far; used to name registers.
    declared: [u32; 6],
    /// The lowest `.version` requested with [`Builder::require`].
    version: Version,
}

impl Builder {
    /// A kernel with this name, without parameters.
    pub fn kernel(name: &str) -> Builder {
        Builder {
            name: name.to_owned(),
            params: Vec::new(),
            bounds: LaunchBounds::default(),
            body: Body::default(),
            globals: Vec::new(),
            guard: None,
            declared: [0; 6],
            version: Version { major: 7, minor: 0 },
        }
    }

    /// Declares `.maxntid threads`, which limits the registers per thread that ptxas may use.
    pub fn max_threads(&mut self, threads: u32) {
        self.bounds.max_threads = Some([threads, 1, 1]);
    }

    /// Declares `.minnctapersm ctas`.
    pub fn min_ctas_per_sm(&mut self, ctas: u32) {
        self.bounds.min_ctas_per_sm = Some(ctas);
    }

    /// The module that contains this kernel, with the lowest `.version` that supports the target and
    /// everything that was emitted.
    pub fn into_module(mut self, target: Target) -> Module {
        self.op(Op::Ret { uni: false }, []);
        registers::sort(&mut self.body);
        self.body.number_labels();
        let function = Function {
            kind: FunctionKind::Entry,
            linkage: Linkage::Visible,
            name: self.name.into(),
            returns: Vec::new(),
            params: self.params,
            bounds: self.bounds,
            body: Some(self.body),
        };
        let mut items: Vec<Item> = self.globals.into_iter().map(Item::Variable).collect();
        items.push(Item::Function(function));
        let mut module = Module { version: self.version, target, items };
        module.version = module.minimum_version().max(self.version);
        module.number_lines();
        module
    }

    /// [`Builder::into_module`], verified.
    ///
    /// # Errors
    /// The violations that the verifier finds; each is a fault of the code that uses the builder.
    pub fn into_verified(self, target: Target) -> Result<Verified, Violations> {
        self.into_module(target).verify()
    }

    /// A fresh register, not yet written.
    pub fn reg<V: Value>(&mut self) -> V {
        let (class, prefix) = match V::TYPE {
            Type::B16 => (0, "%h"),
            Type::B32 => (1, "%r"),
            Type::B64 => (2, "%rd"),
            Type::F32 => (3, "%f"),
            Type::F64 => (4, "%fd"),
            _ => (5, "%p"),
        };
        let name = format!("{prefix}{}", self.declared[class]).into();
        self.declared[class] += 1;
        let reg = Reg(self.body.registers.len() as u32);
        self.body.registers.push(Register { name, ty: V::TYPE });
        V::from_reg(reg)
    }

    /// `N` fresh registers.
    pub fn regs<V: Value, const N: usize>(&mut self) -> [V; N] {
        std::array::from_fn(|_| self.reg())
    }

    /// Emits any operation; for operations without a typed method.
    pub fn op(&mut self, op: Op, operands: impl IntoIterator<Item = Operand>) {
        let operands: SmallVec<[Operand; 4]> = operands.into_iter().collect();
        let guard = self.guard;
        self.body.statements.push(Statement::Inst(Instruction { guard, op, operands, line: 0 }));
    }

    /// Raises the module's `.version` to at least this one.
    pub fn require(&mut self, major: u32, minor: u32) {
        self.version = self.version.max(Version { major, minor });
    }

    /// Emits an operation with one result.
    fn compute<V: Value>(&mut self, d: V, op: Op, sources: impl IntoIterator<Item = Operand>) {
        self.op(op, std::iter::once(Operand::Reg(d.reg())).chain(sources));
    }

    // ---- parameters and variables
    // ------------------------------------------------------------------------------

    fn param<V: Value>(&mut self, name: &str, ty: Type) -> V {
        let param = Param {
            space: ParamSpace::Param,
            align: ty.bytes(),
            ty,
            name: name.into(),
            elements: None,
            pointer: None,
        };
        self.params.push(param);
        let d = self.reg();
        let address = crate::Address { base: Base::Symbol(name.into()), offset: 0 };
        self.compute(d, Op::Ld(crate::Memory::plain(Space::Param, ty)), [Operand::Address(address)]);
        d
    }

    /// Declares the next parameter, a pointer to global memory, and loads it.
    pub fn param_pointer(&mut self, name: &str) -> Global {
        let generic: R64 = self.param(name, Type::U64);
        let base = self.reg();
        let cvta = Op::Cvta { space: Space::Global, to_space: true, ty: Type::U64 };
        self.compute::<R64>(base, cvta, [Operand::Reg(generic.reg())]);
        base.into()
    }

    /// Declares the next parameter, a 32-bit integer, and loads it.
    pub fn param_u32(&mut self, name: &str) -> R32 {
        self.param(name, Type::U32)
    }

    /// Declares the next parameter, a 64-bit integer, and loads it.
    pub fn param_u64(&mut self, name: &str) -> R64 {
        self.param(name, Type::U64)
    }

    /// Declares the next parameter, an f32, and loads it.
    pub fn param_f32(&mut self, name: &str) -> F32 {
        self.param(name, Type::F32)
    }

    /// Declares the next parameter, a tensor map by value, and returns its generic address.
    pub fn param_tensor_map(&mut self, name: &str) -> TensorMapPtr {
        self.params.push(Param {
            space: ParamSpace::Param,
            align: TensorMapSpec::ALIGN,
            ty: Type::B8,
            name: name.into(),
            elements: Some(TensorMapSpec::BYTES),
            pointer: None,
        });
        let (parameter, base): (R64, R64) = (self.reg(), self.reg());
        self.compute(parameter, Op::Mov(Type::U64), [Operand::Symbol(name.into(), 0)]);
        let cvta = Op::Cvta { space: Space::Param, to_space: false, ty: Type::U64 };
        self.compute(base, cvta, [Operand::Reg(parameter.reg())]);
        TensorMapPtr { base }
    }

    /// Declares a shared array of `bytes` bytes and returns its address.
    pub fn shared_array(&mut self, name: &str, align: u32, bytes: u32) -> Shared {
        self.body.variables.push(bytes_in(
            Space::Shared,
            Linkage::Private,
            name,
            align,
            vec![u64::from(bytes)],
        ));
        self.address_of(name)
    }

    /// Declares the dynamic shared memory of the launch and returns its address.
    pub fn dynamic_shared(&mut self, align: u32) -> Shared {
        let name = format!("{}_shared", self.name);
        self.globals.push(bytes_in(Space::Shared, Linkage::Extern, &name, align, vec![0]));
        self.address_of(&name)
    }

    fn address_of(&mut self, name: &str) -> Shared {
        let base: R32 = self.reg();
        self.compute(base, Op::Mov(Type::U32), [Operand::Symbol(name.into(), 0)]);
        base.into()
    }

    /// Declares a private array of `bytes` bytes in local memory and returns its address; for accumulators
    /// with a variable index.
    pub fn local_array(&mut self, name: &str, align: u32, bytes: u32) -> Local {
        let dims = vec![u64::from(bytes)];
        self.body.variables.push(bytes_in(Space::Local, Linkage::Private, name, align, dims));
        let base: R64 = self.reg();
        self.compute(base, Op::Mov(Type::U64), [Operand::Symbol(name.into(), 0)]);
        Local { base, offset: 0 }
    }

    /// Reads a 32-bit special register.
    pub fn special(&mut self, register: SpecialReg) -> R32 {
        let d = self.reg();
        self.compute(d, Op::Mov(register.ty()), [Operand::Special(register)]);
        d
    }

    fn fresh_label(&mut self, what: &str) -> Label {
        let label = Label(self.body.labels.len() as u32);
        self.body.labels.push(format!("$L{}_{what}", label.0).into());
        label
    }

    fn place(&mut self, label: Label) {
        self.body.statements.push(Statement::Label(label));
    }
}

fn bytes_in(space: Space, linkage: Linkage, name: &str, align: u32, dims: Vec<u64>) -> Variable {
    Variable { linkage, space, align, ty: Type::B8, vector: 1, name: name.into(), dims, init: None }
}
