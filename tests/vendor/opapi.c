/* The part of CANN's operator library that torch_npu calls around every operator: descriptions of tensors and lists.
 * stub.py adds two functions for every operator named in the wheel: one returns 0, the other notes the launch. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = 161002, NZ = 29 };
enum { FLOAT = 0, FLOAT16 = 1, INT8 = 2, INT32 = 3, BF16 = 27 };

typedef struct { int type; uint64_t rank; int64_t dims[8]; } Tensor;

Tensor *aclCreateTensor(const int64_t *dims, uint64_t rank, int type, const int64_t *strides, int64_t offset,
                        int format, const int64_t *storage_dims, uint64_t storage_rank, void *data) {
    Tensor *t = calloc(1, sizeof(Tensor));
    t->type = type;
    t->rank = rank < 8 ? rank : 8;
    memcpy(t->dims, dims, t->rank * sizeof(int64_t));
    return t;
}

#define CREATE(name) void *aclCreate##name(void) { return calloc(1, 64); }
#define DESTROY(name) int aclDestroy##name(void *p) { free(p); return OK; }
CREATE(Scalar) CREATE(IntArray) CREATE(BoolArray) CREATE(FloatArray) CREATE(TensorList) CREATE(ScalarList)
DESTROY(Tensor) DESTROY(Scalar) DESTROY(IntArray) DESTROY(BoolArray) DESTROY(FloatArray) DESTROY(TensorList)
DESTROY(ScalarList)

/* Names of the operators that were launched, one a line; the functions that stub.py adds report here. */
static char launched[1 << 20];
static unsigned long length;

long launch(const char *name) {
    unsigned long n = strlen(name);
    if (length + n + 2 < sizeof(launched)) {
        memcpy(launched + length, name, n);
        length += n;
        launched[length++] = '\n';
        launched[length] = 0;
    }
    return OK;
}

const char *stub_launches(void) { return launched; }
void stub_forget(void) { length = 0; launched[0] = 0; }

int InitHugeMemThreadLocal(void) { return OK; }
int UnInitHugeMemThreadLocal(void) { return OK; }
int ReleaseHugeMem(void) { return OK; }
int SetDeterministic(void) { return OK; }

/* Storage dims of a matrix in fractal format: 16 rows by 32 bytes per fractal, outer dims in front. */
int aclnnNpuFormatCastCalculateSizeAndFormat(const Tensor *t, int format, int type, int64_t **dims, uint64_t *rank,
                                             int *actual) {
    *actual = format;
    if (format != NZ) {
        *rank = t->rank;
        *dims = malloc(sizeof(int64_t) * (t->rank + 1));
        memcpy(*dims, t->dims, sizeof(int64_t) * t->rank);
        return OK;
    }
    if (t->rank < 2) return INVALID;
    int size = t->type == FLOAT || t->type == INT32 ? 4 : t->type == FLOAT16 || t->type == BF16 ? 2 : 1;
    int64_t wide = 32 / size, rows = t->dims[t->rank - 2], columns = t->dims[t->rank - 1];
    uint64_t n = t->rank - 2;
    *rank = t->rank + 2;
    *dims = malloc(sizeof(int64_t) * *rank);
    memcpy(*dims, t->dims, sizeof(int64_t) * n);
    (*dims)[n] = (columns + wide - 1) / wide;
    (*dims)[n + 1] = (rows + 15) / 16;
    (*dims)[n + 2] = 16;
    (*dims)[n + 3] = wide;
    return OK;
}
