/* Memory of ranges of device addresses, for PyTorch's pools and for what lies in none.

   PyTorch calls `bridge_cg_allocate` inside its allocator's lock and without Python's, so nothing of Python may run. */

#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>

typedef unsigned long long address;

/* Functions of cuda.h and what they are called with. */
struct driver {
    int (*create)(address *handle, size_t size, const void *properties, address flags);
    int (*map)(address first, size_t size, size_t offset, address handle, address flags);
    int (*allow)(address first, size_t size, const void *access, size_t count);
    int (*unmap)(address first, size_t size);
    int (*release)(address handle);
    const void *properties, *access;
    size_t page, most; /* what sizes are multiples of; the size of the largest piece */
};

struct piece {
    size_t size;
    address handle;
};

/* Memory is behind the first `mapped` of `size` addresses, in pieces. What is allocated next begins at `cursor`. */
struct range {
    const struct driver *driver;
    address first;
    size_t size, cursor, mapped;
    size_t segments; /* that PyTorch has not given back */
    struct piece *pieces;
    size_t count, room;
    struct range *next;
};

/* What PyTorch's pools get memory from now, and all ranges that there are. */
static struct range *current, *all;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void bridge_cg_use(struct range *range) { current = range; }

void bridge_cg_add(struct range *range) {
    pthread_mutex_lock(&lock);
    range->next = all;
    all = range;
    pthread_mutex_unlock(&lock);
}

void bridge_cg_remove(struct range *range) {
    struct range **each;
    pthread_mutex_lock(&lock);
    for (each = &all; *each; each = &(*each)->next)
        if (*each == range) {
            *each = range->next;
            break;
        }
    pthread_mutex_unlock(&lock);
}

/* Unmap whole pieces at the end, as long as `keep` bytes keep memory. Returns 0, or the driver's error. */
int bridge_cg_shrink(struct range *r, size_t keep) {
    while (r->count && r->mapped - r->pieces[r->count - 1].size >= keep) {
        struct piece last = r->pieces[r->count - 1];
        int status = r->driver->unmap(r->first + r->mapped - last.size, last.size);
        if (status)
            return status;
        r->mapped -= last.size;
        r->count--;
        if ((status = r->driver->release(last.handle)))
            return status;
    }
    if (!r->count) {
        free(r->pieces);
        r->pieces = NULL;
        r->room = 0;
    }
    return 0;
}

/* Map one more piece. Returns 0, -1 without host memory, or the driver's error. */
static int add_piece(struct range *r, size_t size) {
    const struct driver *d = r->driver;
    struct piece next = {size, 0};
    int status;
    if (r->count == r->room) {
        size_t room = r->room ? 2 * r->room : 8;
        struct piece *moved = realloc(r->pieces, room * sizeof *moved);
        if (!moved)
            return -1;
        r->pieces = moved;
        r->room = room;
    }
    if ((status = d->create(&next.handle, size, d->properties, 0)))
        return status;
    if (!(status = d->map(r->first + r->mapped, size, 0, next.handle, 0))) {
        if (!(status = d->allow(r->first + r->mapped, size, d->access, 1))) {
            r->pieces[r->count++] = next;
            r->mapped += size;
            return 0;
        }
        d->unmap(r->first + r->mapped, size);
    }
    d->release(next.handle);
    return status;
}

/* Have memory behind `size` addresses at least, or no more than before. Returns 0, -1 without addresses or host memory,
   or the driver's error. */
int bridge_cg_grow(struct range *r, size_t size) {
    const struct driver *d = r->driver;
    size_t before = r->mapped, end = (size + d->page - 1) / d->page * d->page;
    if (end > r->size)
        return -1;
    while (r->mapped < end) {
        size_t left = end - r->mapped;
        int status = add_piece(r, left < d->most ? left : d->most);
        if (status) {
            bridge_cg_shrink(r, before);
            return status;
        }
    }
    return 0;
}

/* What PyTorch calls for a segment of a pool; it takes NULL for too little memory. */
void *bridge_cg_allocate(size_t size, int device, void *stream) {
    struct range *r = current;
    size_t end;
    (void)device;
    (void)stream;
    if (!r)
        return NULL;
    end = r->cursor + (size + r->driver->page - 1) / r->driver->page * r->driver->page;
    if (bridge_cg_grow(r, end))
        return NULL;
    size = r->cursor;
    r->cursor = end;
    pthread_mutex_lock(&lock);
    r->segments++;
    pthread_mutex_unlock(&lock);
    return (void *)(size_t)(r->first + size);
}

/* What PyTorch calls to give a segment back. Its memory stays: the range's next pool uses it from the beginning. */
void bridge_cg_give_back(void *segment, size_t size, int device, void *stream) {
    address at = (address)(size_t)segment;
    struct range *r;
    (void)size;
    (void)device;
    (void)stream;
    pthread_mutex_lock(&lock);
    for (r = all; r; r = r->next)
        if (r->first <= at && at < r->first + r->size) {
            r->segments--;
            break;
        }
    pthread_mutex_unlock(&lock);
}
