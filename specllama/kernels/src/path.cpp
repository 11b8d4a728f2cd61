// The table of one instruction set; compiled once for each, with its flags.
#include "path.h"

#include "attention.h"
#include "columns.h"
#include "head.h"

namespace speck {
namespace SPECK_ISA {

template <class T> constexpr Type type(const char* name) {
    return {name, T::block, sizeof(typename T::File), sizeof(typename T::Packed), sizeof(typename T::Column),
            pack<T>, tiles<T>, quantize_blocks<typename T::Column>};
}

static const Type types[] = {
    type<F32>("f32"),       type<F16>("f16"),   type<BF16>("bf16"),
    type<Q4_0>("q4_0"),     type<Q4_1>("q4_1"), type<Q5_0>("q5_0"), type<Q5_1>("q5_1"),
    type<Q8_0>("q8_0"),     type<Q2_K>("q2_K"), type<Q3_K>("q3_K"), type<Q4_K>("q4_K"),
    type<Q5_K>("q5_K"),     type<Q6_K>("q6_K"), type<IQ4_NL>("iq4_nl"), type<IQ4_XS>("iq4_xs"),
};

static const Type coarse = {"coarse", Coarse::block, Coarse::block * sizeof(float), sizeof(Coarse::Packed), sizeof(Column32),
                            nullptr, tiles<Coarse>, quantize_blocks<Column32>};

}  // namespace SPECK_ISA

#define SPECK_JOIN_(a, b) a##b
#define SPECK_JOIN(a, b) SPECK_JOIN_(a, b)
#define SPECK_TEXT_(a) #a
#define SPECK_TEXT(a) SPECK_TEXT_(a)

const Path& SPECK_JOIN(SPECK_ISA, _path)() {
    static const Path path{SPECK_TEXT(SPECK_ISA), SPECK_ISA::L, SPECK_ISA::types, sizeof SPECK_ISA::types / sizeof(Type),
                           SPECK_ISA::coarse, SPECK_ISA::pack_coarse, SPECK_ISA::highest, SPECK_ISA::high_groups,
                           SPECK_ISA::look, SPECK_ISA::attend_chunk, SPECK_ISA::join, SPECK_ISA::finish, SPECK_ISA::Wide::n};
    return path;
}

}  // namespace speck
