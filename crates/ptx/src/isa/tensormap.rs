//! Changes of tensor maps (PTX ISA, "tensormap.replace" and "tensormap.cp_fenceproxy").

use smallvec::smallvec;

use super::Scope;
use super::requirement::{need, need_specific};
use super::signature::{address, read, value};
use super::syntax::names;
use crate::verify::rules::{constant, range};
use crate::{Signature, SlotKind, Space, TensorMapSpec, Type};

/// A field of a tensor map, and its new value. Fields with one value for each dimension take the number of
/// the dimension before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorMapField {
    /// The address of element (0, 0, …) in bytes, of 64 bits.
    GlobalAddress,
    /// The number of dimensions less one.
    Rank,
    /// Elements of the box along a dimension.
    BoxDim,
    /// Elements of the tensor along a dimension.
    GlobalDim,
    /// Bytes between neighbours along a dimension behind the innermost, of 64 bits.
    GlobalStride,
    /// Elements between the elements that are copied along a dimension.
    ElementStride,
    /// The number of an element type, a constant.
    Elemtype,
    /// The number of an interleaved layout, a constant.
    InterleaveLayout,
    /// The number of a swizzle, a constant.
    SwizzleMode,
    /// A constant names the value that a copy reads outside the tensor: 0 for zeros.
    FillMode,
    /// The number of bytes that the swizzle moves together, a constant.
    SwizzleAtomicity,
}

impl TensorMapField {
    /// The type of the new value.
    pub const fn ty(self) -> Type {
        match self {
            TensorMapField::GlobalAddress | TensorMapField::GlobalStride => Type::B64,
            _ => Type::B32,
        }
    }

    /// Whether there is one value for each dimension.
    pub const fn has_dimension(self) -> bool {
        matches!(
            self,
            TensorMapField::BoxDim
                | TensorMapField::GlobalDim
                | TensorMapField::GlobalStride
                | TensorMapField::ElementStride
        )
    }

    /// The largest new value of a field that takes a constant.
    const fn largest(self) -> Option<i64> {
        match self {
            TensorMapField::Elemtype => Some(12),
            TensorMapField::InterleaveLayout => Some(2),
            TensorMapField::SwizzleMode | TensorMapField::SwizzleAtomicity => Some(3),
            TensorMapField::FillMode => Some(1),
            _ => None,
        }
    }
}

names! {
    TensorMapField {
        GlobalAddress = "global_address", Rank = "rank", BoxDim = "box_dim", GlobalDim = "global_dim",
        GlobalStride = "global_stride", ElementStride = "element_stride", Elemtype = "elemtype",
        InterleaveLayout = "interleave_layout", SwizzleMode = "swizzle_mode", FillMode = "fill_mode",
        SwizzleAtomicity = "swizzle_atomicity",
    }
}

instructions! { ($) tensormap tensormap_list

    /// `[map], dimension?, value`: changes a field of a tensor map. PTX ISA, "tensormap.replace".
    TensormapReplace {
        /// The field.
        field: TensorMapField,
        /// `Global`, `Shared` or `Generic`.
        space: Space,
    } => {
        text: |m| {
            m.head("tensormap.replace.tile")?;
            m.one(field, "a field such as `.global_address`", TensorMapField::NAMES)?;
            let spaces = &[(Space::Global, "global"), (Space::Shared, "shared::cta")];
            m.optional(space, Space::Generic, spaces)?;
            m.word("b1024")?;
            m.word(if field.ty() == Type::B64 { "b64" } else { "b32" })
        },
        operands: {
            let mut operands: Signature = smallvec![address(space)];
            operands.extend(field.has_dimension().then(|| read(SlotKind::Constant)));
            operands.push(read(field.largest().map_or(value(field.ty()), |_| SlotKind::Constant)));
            operands
        },
        needs: match field {
            TensorMapField::SwizzleAtomicity => need_specific(86, 100),
            _ => need_specific(83, 90),
        },
        check: |inst| match field.largest() {
            Some(largest) => range("the new value", constant(inst, 1), 0, largest),
            None if field.has_dimension() => range("the dimension", constant(inst, 1), 0, 4),
            None => Ok(()),
        },
    }

    /// `[to], [from], 128`: copies a tensor map from shared to global memory and releases it to the tensor
    /// map proxy. PTX ISA, "tensormap.cp_fenceproxy".
    TensormapCopy(scope: Scope) => {
        text: |m| {
            m.head("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic")?;
            m.word("release")?;
            m.one(scope, "`.cta`, `.cluster`, `.gpu` or `.sys`", Scope::NAMES)?;
            m.aligned()
        },
        operands: smallvec![address(Space::Global), address(Space::Shared), read(SlotKind::Constant)],
        needs: need(83, 90),
        check: |inst| range("the bytes of a tensor map", constant(inst, 2), 128, 128),
        accesses: |_position| Some(TensorMapSpec::BYTES),
    }
}
