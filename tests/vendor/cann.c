/* The part of the CANN runtime that torch_npu needs in order to load and to run its host code: devices, memory, copies,
 * streams and events, all in host memory.  No operator computes anything.  The chip is named by CANN_STUB_SOC.
 * stub.py adds every other symbol as a function that returns 0.  Signatures: include/acl of the torch_npu wheel. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { OK = 0, NO_MEMORY = 207001 };

static __thread int device;
static int capturing;
static long captured_model;

static const char *soc(void) {
    const char *name = getenv("CANN_STUB_SOC");
    return name && *name ? name : "Ascend910B3";
}

/* Placeholders of a plausible size; nothing may rely on them. */
static int64_t fact(int attribute) {
    switch (attribute) {
    case 1: return 8;                                   /* host cores */
    case 101: case 102: return 20;                      /* cube cores */
    case 201: return 40;                                /* vector cores */
    case 204: return 192 << 10;                         /* unified buffer */
    case 301: return (int64_t)64 << 30;                 /* memory */
    case 302: return (int64_t)192 << 20;                /* level-2 cache */
    default: return 0;
    }
}

static int give(void **p, size_t bytes) {
    *p = aligned_alloc(512, (bytes + 544) / 512 * 512);
    return *p ? OK : NO_MEMORY;
}

static int handle(void **p) { *p = calloc(1, 64); return *p ? OK : NO_MEMORY; }

/* ---- the machine */
const char *aclrtGetSocName(void) { return soc(); }
int aclrtGetDeviceCount(unsigned *n) { *n = 8; return OK; }
int aclrtGetDevice(int *d) { *d = device; return OK; }
int aclrtSetDevice(int d) { device = d; return OK; }
int aclrtGetVersion(int *major, int *minor, int *patch) { *major = 1; *minor = 15; *patch = 0; return OK; }
int aclsysGetVersionStr(char *package, char *out) { if (out) strcpy(out, "9.1.0"); return OK; }
int aclsysGetCANNVersion(int package, char *out) { if (out) { memset(out, 0, 128); strcpy(out, "9.1.0"); } return OK; }
const char *aclGetRecentErrMsg(void) { return "(no runtime)"; }
int aclrtGetDeviceInfo(unsigned d, int attribute, int64_t *v) { *v = fact(attribute); return OK; }
int aclGetDeviceCapability(unsigned d, int which, int64_t *v) {
    *v = fact(which == 0 ? 101 : which == 1 ? 201 : which == 2 ? 302 : 0);
    return OK;
}
int aclrtGetDeviceResLimit(int d, int kind, unsigned *v) { *v = (unsigned)fact(kind ? 201 : 102); return OK; }
int aclrtGetStreamResLimit(void *s, int kind, unsigned *v) { return aclrtGetDeviceResLimit(0, kind, v); }
int aclrtGetResInCurrentThread(int kind, unsigned *v) { return aclrtGetDeviceResLimit(0, kind, v); }
int aclrtGetMemInfo(int kind, size_t *unused, size_t *total) {
    *total = fact(301);
    *unused = *total / 16 * 15;
    return OK;
}
int aclrtGetCurrentContext(void **c) { static int context; *c = &context; return OK; }
int aclrtGetPrimaryCtxState(int d, unsigned *flags, int *active) {
    if (flags) *flags = 0;
    if (active) *active = 1;
    return OK;
}
int aclrtDeviceCanAccessPeer(int *can, int a, int b) { *can = 1; return OK; }
int aclrtGetSysParamOpt(int option, int64_t *v) { *v = 0; return OK; }
int aclrtGetStreamOverflowSwitch(void *s, unsigned *v) { *v = 0; return OK; }
/* option 10 is jit compilation: unless it is disabled, every operator takes a path that graph capture refuses */
size_t aclGetCompileoptSize(int option) { return 64; }
int aclGetCompileopt(int option, char *v, size_t n) {
    memset(v, 0, n);
    strcpy(v, option == 10 ? "disable" : "0");
    return OK;
}

/* ---- memory */
int aclrtMalloc(void **p, size_t n, int policy) { return give(p, n); }
int aclrtMallocAlign32(void **p, size_t n, int policy) { return give(p, n); }
int aclrtMallocHost(void **p, size_t n) { return give(p, n); }
int aclrtMallocHostWithCfg(void **p, size_t n, void *config) { return give(p, n); }
int aclrtFree(void *p) { free(p); return OK; }
int aclrtFreeHost(void *p) { free(p); return OK; }
int aclrtMallocPhysical(void **h, size_t n, const void *properties, uint64_t flags) { return handle(h); }
int aclrtFreePhysical(void *h) { free(h); return OK; }
int aclrtReserveMemAddress(void **p, size_t n, size_t alignment, void *expected, uint64_t flags) {
    *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return *p == MAP_FAILED ? NO_MEMORY : OK;
}
int aclrtMemcpy(void *d, size_t room, const void *s, size_t n, int kind) { memmove(d, s, n); return OK; }
int aclrtMemcpyAsync(void *d, size_t room, const void *s, size_t n, int kind, void *st) { memmove(d, s, n); return OK; }
int aclrtMemcpyAsyncWithCondition(void *d, size_t room, const void *s, size_t n, int kind, void *st) {
    memmove(d, s, n);
    return OK;
}
int aclrtMemset(void *d, size_t room, int v, size_t n) { memset(d, v, n); return OK; }
int aclrtMemsetAsync(void *d, size_t room, int v, size_t n, void *st) { memset(d, v, n); return OK; }

/* ---- streams and events: everything has happened already */
int aclrtCreateStream(void **s) { return handle(s); }
int aclrtCreateStreamWithConfig(void **s, unsigned priority, unsigned flags) { return handle(s); }
int aclrtDestroyStream(void *s) { return OK; }
int aclrtDestroyStreamForce(void *s) { return OK; }
int aclrtStreamQuery(void *s, int *status) { *status = 1; return OK; }
int aclrtStreamGetId(void *s, int *id) { *id = (int)(((uintptr_t)s >> 6) & 0xffff); return OK; }
int aclrtCreateEvent(void **e) { return handle(e); }
int aclrtCreateEventWithFlag(void **e, unsigned flags) { return handle(e); }
int aclrtCreateEventExWithFlag(void **e, unsigned flags) { return handle(e); }
int aclrtDestroyEvent(void *e) { free(e); return OK; }
int aclrtQueryEventStatus(void *e, int *status) { *status = 1; return OK; }
int aclrtQueryEventWaitStatus(void *e, int *status) { *status = 1; return OK; }
int aclQueryEventRecordedStatus(void *e, int *status) { *status = 1; return OK; }
int aclrtEventElapsedTime(float *ms, void *a, void *b) { *ms = 0; return OK; }

/* ---- graph capture and collectives */
int aclmdlRICaptureBegin(void *s, int mode) { capturing = 1; return OK; }
int aclmdlRICaptureEnd(void *s, void **model) { capturing = 0; *model = &captured_model; return OK; }
int aclmdlRICaptureGetInfo(void *s, int *status, void **model) {
    if (status) *status = capturing;
    if (model) *model = &captured_model;
    return OK;
}
int HcclGetRootInfo(void *root) { memset(root, 7, 64); return OK; }
