//! What each operation takes: the positions of its operands, whether they are read or written, and their types.

mod asynchronous;

use smallvec::{SmallVec, smallvec};

use crate::{
    AtomicOp, BarKind, Base, BinaryOp, CarryOp, CreatePolicy, FenceSem, Instruction, MatchMode, MatrixAccess,
    Op, Operand, Reg, Space, TernaryOp, Type, UnaryOp, VoteMode,
};

/// Whether an operand is read or written. Results come first in every instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flow {
    /// A source.
    Read,
    /// A result.
    Write,
    /// A result that is also a source: the sums of `wgmma`.
    ReadWrite,
}

/// What may stand at a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SlotKind {
    /// A register, or as a source also an immediate, a special register or a symbol, of exactly this width.
    Value(Type),
    /// As `Value`, but the register may be wider than the type (`ld`, `st`, `cvt`; PTX ISA, "Operand Size Exceeding
    /// Instruction-Type Size").
    Wide(Type),
    /// A scalar or a vector that packs or unpacks it (`mov`).
    Packable(Type),
    /// `{…}` of that many elements.
    Vector(Type, usize),
    /// As `Vector`, with registers that may be wider than the type.
    WideVector(Type, usize),
    /// A result of the first type, and optionally `|q`, a predicate.
    Pair(Type),
    /// An address into a space.
    Address(Space),
    /// An integer constant.
    Constant,
    /// A branch target.
    Label,
    /// The targets of `brx.idx`.
    Labels,
    /// The callee.
    Callee,
    /// Results or arguments of a call.
    List,
}

/// One position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    /// Read or written.
    pub flow: Flow,
    /// What may stand here.
    pub kind: SlotKind,
    /// Whether it may be left out; only at the end.
    pub optional: bool,
}

/// The positions of an operation, in order.
pub type Signature = SmallVec<[Slot; 5]>;

const fn write(kind: SlotKind) -> Slot {
    Slot { flow: Flow::Write, kind, optional: false }
}

const fn read(kind: SlotKind) -> Slot {
    Slot { flow: Flow::Read, kind, optional: false }
}

const fn optional(kind: SlotKind) -> Slot {
    Slot { flow: Flow::Read, kind, optional: true }
}

const fn value(ty: Type) -> SlotKind {
    SlotKind::Value(ty)
}

const POLICY: SlotKind = SlotKind::Value(Type::B64);
const MASK: SlotKind = SlotKind::Value(Type::B32);

/// `d, a, b, …` of the same type.
fn uniform(ty: Type, sources: usize) -> Signature {
    let mut s: Signature = smallvec![write(value(ty))];
    s.extend(std::iter::repeat_n(read(value(ty)), sources));
    s
}

/// The type twice as wide.
fn widened(ty: Type) -> Type {
    match ty {
        Type::U16 => Type::U32,
        Type::S16 => Type::S32,
        Type::U32 => Type::U64,
        Type::S32 => Type::S64,
        other => other,
    }
}

/// What a register holds that carries one element or one pack of this type.
fn carrier(ty: Type) -> Type {
    match ty {
        Type::Tf32 => Type::B32,
        Type::Bf16 => Type::B16,
        Type::Bf16x2 | Type::F16x2 | Type::U16x2 | Type::S16x2 => Type::B32,
        Type::E4m3x2 | Type::E5m2x2 => Type::B16,
        Type::F32x2 => Type::B64,
        other => other,
    }
}

impl Op {
    /// The positions of the operands, as the PTX ISA orders them.
    pub fn signature(&self) -> Signature {
        match *self {
            Op::Unary(op, ty, _) => unary(op, carrier(ty)),
            Op::Binary(op, ty, _) => binary(op, carrier(ty)),
            Op::Ternary(op, ty, _) => ternary(op, carrier(ty)),
            Op::Carry(op, ty) => uniform(ty, if op.is_mad() { 3 } else { 2 }),
            Op::Setp { ty, .. } => compare(SlotKind::Pair(Type::Pred), ty, self.has_combine()),
            Op::Set { to, ty, .. } => compare(value(carrier(to)), ty, self.has_combine()),
            Op::Selp(ty) => {
                let mut s = uniform(ty, 2);
                s.push(read(value(Type::Pred)));
                s
            }
            Op::Slct { ty, cond, .. } => {
                let mut s = uniform(ty, 2);
                s.push(read(value(cond)));
                s
            }
            Op::Testp(_, ty) => smallvec![write(value(Type::Pred)), read(value(ty))],
            Op::Lop3(combine) => logic(combine.is_some()),
            Op::Shf(..) | Op::Fns => uniform(Type::B32, 3),
            Op::Bfe(ty) => bits(ty, 1),
            Op::Bfi(ty) => bits(ty, 2),
            Op::Prmt(_) => uniform(Type::B32, 3),
            Op::Bmsk(_) => uniform(Type::B32, 2),
            Op::Szext(_, ty) => smallvec![write(value(ty)), read(value(ty)), read(value(Type::U32))],
            Op::Dp4a(a, b) | Op::Dp2a(_, a, b) => {
                let sum = if a.is_signed() || b.is_signed() { Type::S32 } else { Type::U32 };
                smallvec![write(value(sum)), read(value(Type::B32)), read(value(Type::B32)), read(value(sum))]
            }
            Op::Mov(ty) if ty.is_bits() => {
                smallvec![write(SlotKind::Packable(ty)), read(SlotKind::Packable(ty))]
            }
            Op::Mov(ty) => uniform(ty, 1),
            Op::Cvt(cvt) => {
                let from = read(SlotKind::Wide(carrier(cvt.from)));
                let mut s: Signature = smallvec![write(SlotKind::Wide(carrier(cvt.to))), from];
                if cvt.packed() {
                    s.push(from);
                }
                s
            }
            Op::CvtPack { from, chained, .. } => {
                let mut s: Signature =
                    smallvec![write(value(Type::B32)), read(value(from)), read(value(from))];
                if chained {
                    s.push(read(value(Type::B32)));
                }
                s
            }
            Op::Cvta { ty, .. } => uniform(ty, 1),
            Op::Getctarank { ty, .. } => smallvec![write(value(Type::U32)), read(value(ty))],
            Op::Isspacep(_) => smallvec![write(value(Type::Pred)), read(value(Type::U64))],
            Op::Mapa { ty, .. } => smallvec![write(value(ty)), read(value(ty)), read(value(Type::U32))],
            Op::Ld(_) | Op::St(_) | Op::Atom(_) | Op::Red(_) => self.memory(),
            Op::Prefetch(space, _) => smallvec![read(SlotKind::Address(space))],
            Op::Discard(space) => smallvec![read(SlotKind::Address(space)), read(SlotKind::Constant)],
            Op::CreatePolicy(CreatePolicy { .. }) => {
                smallvec![write(value(Type::B64)), optional(value(Type::F32))]
            }
            Op::CpAsync(copy) => {
                let src_size = value(if copy.ignore_src { Type::Pred } else { Type::U32 });
                smallvec![
                    read(SlotKind::Address(Space::Shared)),
                    read(SlotKind::Address(Space::Global)),
                    read(SlotKind::Constant),
                    optional(src_size),
                    optional(POLICY)
                ]
            }
            Op::CpAsyncWaitGroup => smallvec![read(SlotKind::Constant)],
            Op::CpAsyncMbarrierArrive { space, .. } => smallvec![read(SlotKind::Address(space))],
            Op::CpAsyncBulk(_)
            | Op::CpReduceAsyncBulk(_)
            | Op::CpAsyncBulkTensor(_)
            | Op::CpReduceAsyncBulkTensor(_)
            | Op::CpAsyncBulkPrefetch { .. }
            | Op::CpAsyncBulkPrefetchTensor { .. } => self.bulk(),
            Op::CpAsyncBulkWaitGroup { .. } | Op::WgmmaWaitGroup => smallvec![read(SlotKind::Constant)],
            Op::StAsync(st) => asynchronous::store(st.space, st.ty, st.vector),
            Op::RedAsync(red) => asynchronous::store(red.space, red.ty, 1),
            Op::Ldmatrix(m) => {
                smallvec![write(SlotKind::Vector(Type::B32, m.registers())), read(SlotKind::Address(m.space))]
            }
            Op::Stmatrix(m) => {
                smallvec![read(SlotKind::Address(m.space)), read(SlotKind::Vector(Type::B32, m.registers()))]
            }
            Op::Movmatrix => uniform(Type::B32, 1),
            Op::Mma(mma) => product([mma.a, mma.b, mma.c, mma.d], mma.registers()),
            Op::Wmma(wmma) => product([wmma.a, wmma.b, wmma.c, wmma.d], wmma.registers()),
            Op::WmmaLoad(m) => smallvec![
                write(SlotKind::Vector(element(m.ty), m.registers())),
                read(SlotKind::Address(m.space)),
                optional(value(Type::U32))
            ],
            Op::WmmaStore(m) => smallvec![
                read(SlotKind::Address(m.space)),
                read(SlotKind::Vector(element(m.ty), m.registers())),
                optional(value(Type::U32))
            ],
            Op::Wgmma(wgmma) => asynchronous::product(&wgmma),
            Op::Shfl(_) => smallvec![
                write(SlotKind::Pair(Type::B32)),
                read(value(Type::B32)),
                read(value(Type::B32)),
                read(value(Type::B32)),
                read(MASK)
            ],
            Op::Vote(mode) => {
                let to = if mode == VoteMode::Ballot { Type::B32 } else { Type::Pred };
                smallvec![write(value(to)), read(value(Type::Pred)), read(MASK)]
            }
            Op::Match(mode, ty) => {
                let to = match mode {
                    MatchMode::Any => value(Type::B32),
                    MatchMode::All => SlotKind::Pair(Type::B32),
                };
                smallvec![write(to), read(value(ty)), read(MASK)]
            }
            Op::Redux { ty, .. } => smallvec![write(value(ty)), read(value(ty)), read(MASK)],
            Op::Activemask => smallvec![write(value(Type::B32))],
            Op::Elect => smallvec![write(SlotKind::Pair(Type::B32)), read(MASK)],
            Op::Bar { kind, .. } => barrier(kind),
            Op::BarWarpSync => smallvec![read(MASK)],
            Op::Mbarrier(op) => asynchronous::mbarrier(op),
            Op::FenceTensormap(FenceSem::Acquire, _) => {
                smallvec![read(SlotKind::Address(Space::Generic)), read(SlotKind::Constant)]
            }
            Op::Bra { .. } => smallvec![read(SlotKind::Label)],
            Op::BrxIdx { .. } => smallvec![read(value(Type::U32)), read(SlotKind::Labels)],
            Op::Call { .. } => {
                smallvec![write(SlotKind::List), read(SlotKind::Callee), read(SlotKind::List)]
            }
            Op::Nanosleep => smallvec![read(value(Type::U32))],
            Op::Pmevent | Op::Setmaxnreg(_) => smallvec![read(SlotKind::Constant)],
            Op::CpAsyncCommitGroup
            | Op::CpAsyncWaitAll
            | Op::BarrierCluster(_)
            | Op::Membar(_)
            | Op::Fence(..)
            | Op::FenceProxy(_)
            | Op::FenceMbarrierInit
            | Op::FenceTensormap(..)
            | Op::CpAsyncBulkCommitGroup
            | Op::WgmmaFence
            | Op::WgmmaCommitGroup
            | Op::Ret { .. }
            | Op::Exit
            | Op::Trap
            | Op::Brkpt
            | Op::Griddepcontrol(_) => Signature::new(),
        }
    }

    fn has_combine(&self) -> bool {
        matches!(self, Op::Setp { combine: Some(_), .. } | Op::Set { combine: Some(_), .. })
    }

    fn memory(&self) -> Signature {
        match *self {
            Op::Ld(m) => {
                let to = if m.vector > 1 {
                    SlotKind::WideVector(m.ty, m.vector.into())
                } else {
                    SlotKind::Wide(m.ty)
                };
                smallvec![write(to), read(SlotKind::Address(m.space)), optional(POLICY)]
            }
            Op::St(m) => {
                let from = if m.vector > 1 {
                    SlotKind::WideVector(m.ty, m.vector.into())
                } else {
                    SlotKind::Wide(m.ty)
                };
                smallvec![read(SlotKind::Address(m.space)), read(from), optional(POLICY)]
            }
            Op::Atom(a) => {
                let operand = atomic_operand(a.ty, a.vector);
                let mut s: Signature =
                    smallvec![write(operand), read(SlotKind::Address(a.space)), read(operand)];
                if a.op == AtomicOp::Cas {
                    s.push(read(operand));
                }
                s.push(optional(POLICY));
                s
            }
            Op::Red(a) => {
                let operand = atomic_operand(a.ty, a.vector);
                smallvec![read(SlotKind::Address(a.space)), read(operand), optional(POLICY)]
            }
            _ => Signature::new(),
        }
    }
}

impl CarryOp {
    /// Whether it multiplies.
    pub const fn is_mad(self) -> bool {
        !matches!(
            self,
            CarryOp::AddCc
                | CarryOp::Addc
                | CarryOp::AddcCc
                | CarryOp::SubCc
                | CarryOp::Subc
                | CarryOp::SubcCc
        )
    }
}

impl MatrixAccess {
    /// 32-bit registers per thread.
    pub const fn registers(&self) -> usize {
        match self.shape {
            // A 16×16 matrix of bytes is two registers a thread; all other matrices are one.
            crate::MatrixShape::M16N16 => self.count as usize * 2,
            _ => self.count as usize,
        }
    }
}

/// `lop3`, without and with a predicate.
fn logic(combines: bool) -> Signature {
    let mut s = uniform(Type::B32, 3);
    s.push(read(SlotKind::Constant));
    if combines {
        s[0] = write(SlotKind::Pair(Type::B32));
        s.push(read(value(Type::Pred)));
    }
    s
}

fn unary(op: UnaryOp, ty: Type) -> Signature {
    let to = match op {
        UnaryOp::Popc | UnaryOp::Clz | UnaryOp::Bfind | UnaryOp::BfindShiftamt => Type::U32,
        _ => ty,
    };
    smallvec![write(value(to)), read(value(ty))]
}

fn binary(op: BinaryOp, ty: Type) -> Signature {
    match op {
        BinaryOp::Shl | BinaryOp::Shr => {
            smallvec![write(value(ty)), read(value(ty)), read(value(Type::U32))]
        }
        BinaryOp::MulWide => smallvec![write(value(widened(ty))), read(value(ty)), read(value(ty))],
        _ => uniform(ty, 2),
    }
}

fn ternary(op: TernaryOp, ty: Type) -> Signature {
    match op {
        TernaryOp::MadWide => {
            smallvec![write(value(widened(ty))), read(value(ty)), read(value(ty)), read(value(widened(ty)))]
        }
        _ => uniform(ty, 3),
    }
}

fn compare(to: SlotKind, ty: Type, combine: bool) -> Signature {
    let ty = value(carrier(ty));
    let mut s: Signature = smallvec![write(to), read(ty), read(ty)];
    if combine {
        s.push(read(value(Type::Pred)));
    }
    s
}

/// `bfe` and `bfi`: sources of the type, then position and length.
fn bits(ty: Type, sources: usize) -> Signature {
    let mut s = uniform(ty, sources);
    s.extend([read(value(Type::U32)), read(value(Type::U32))]);
    s
}

fn atomic_operand(ty: Type, vector: u8) -> SlotKind {
    let ty = carrier(ty);
    if vector > 1 { SlotKind::Vector(ty, vector.into()) } else { value(ty) }
}

/// The type of the registers that hold elements of a matrix.
fn element(ty: Type) -> Type {
    match ty {
        Type::F32 | Type::F64 | Type::S32 => ty,
        _ => Type::B32,
    }
}

/// `{d…}, {a…}, {b…}, {c…}`, from types and registers in the order A, B, C, D.
fn product(types: [Type; 4], registers: [usize; 4]) -> Signature {
    let fragment = |i: usize| SlotKind::Vector(element(types[i]), registers[i]);
    smallvec![write(fragment(3)), read(fragment(0)), read(fragment(1)), read(fragment(2))]
}

fn barrier(kind: BarKind) -> Signature {
    let (id, count) = (value(Type::U32), value(Type::U32));
    match kind {
        BarKind::Sync => smallvec![read(id), optional(count)],
        BarKind::Arrive => smallvec![read(id), read(count)],
        BarKind::RedPopc => {
            smallvec![write(value(Type::U32)), read(id), optional(count), read(value(Type::Pred))]
        }
        BarKind::RedAnd | BarKind::RedOr => {
            smallvec![write(value(Type::Pred)), read(id), optional(count), read(value(Type::Pred))]
        }
    }
}

impl Instruction {
    /// Calls `f` for each register that is read: sources, address bases and the guard. A guarded instruction leaves
    /// its results as they were where the guard is false; that is not counted as a read.
    pub fn registers_read(&self, mut f: impl FnMut(Reg)) {
        if let Some(guard) = self.guard {
            f(guard.reg);
        }
        self.each(Flow::Read, &mut f);
    }

    /// Calls `f` for each register that is written.
    pub fn registers_written(&self, mut f: impl FnMut(Reg)) {
        self.each(Flow::Write, &mut f);
    }

    fn each(&self, flow: Flow, f: &mut impl FnMut(Reg)) {
        let signature = self.op.signature();
        for (i, operand) in self.operands.iter().enumerate() {
            // A missing optional operand in the middle (`bar.red`) shifts only reads among reads.
            let here = signature.get(i).map_or(Flow::Read, |slot| slot.flow);
            if here == flow || here == Flow::ReadWrite {
                registers(operand, f);
            } else if flow == Flow::Read
                && let Operand::Address(address) = operand
                && let Base::Reg(reg) = address.base
            {
                f(reg);
            }
        }
    }
}

fn registers(operand: &Operand, f: &mut impl FnMut(Reg)) {
    match operand {
        Operand::Reg(reg) | Operand::Not(reg) => f(*reg),
        Operand::Pair(a, b) => [a, b].into_iter().flatten().for_each(|reg| f(*reg)),
        Operand::Vector(parts) | Operand::List(parts) => parts.iter().for_each(|part| registers(part, f)),
        Operand::Address(address) => {
            if let Base::Reg(reg) = address.base {
                f(reg);
            }
        }
        Operand::Sink
        | Operand::Imm(_)
        | Operand::Special(_)
        | Operand::Symbol(..)
        | Operand::Label(_)
        | Operand::Labels(_)
        | Operand::Function(_) => {}
    }
}
